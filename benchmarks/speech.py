"""Transcribe with Whisper here and in faster-whisper: `python -m benchmarks.speech MODEL FOLDER --peer-python VENV/bin/python`.

MODEL is a Whisper checkpoint, FOLDER has audio files and a manifest.jsonl (file, text, lang, kind). The peer needs its own
environment with faster-whisper, and with transformers to convert the checkpoint once. Each engine runs in its own process, in
turn, with two threads; the best round of all processes counts. Every round has samples of its own, so that no cache helps.
"float16 weights" is `dtype="auto"`: float32 with the weights as stored.
Both sides: English, greedy, no voice detection, no gates and no fallback; no timestamps, except in faster-whisper's long files,
where it loses text without them. Where faster-whisper has several ways (a long file: one window after another or batches of 8;
several files: in turn, or two workers of one thread), the fastest counts of those with about the fewest wrong words. Ours
includes the pass that checks whether the text reaches the end of its window.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .cpu import AVX2
from .quality import words
from .throughput import ROOT, machine, put
from .whisper_peer import manifest

RATE, WINDOW = 16_000, 30  # Hz; seconds
SAME = 0.03  # share of words; a difference that counts as none
ENGINES: dict[str, dict[str, Any]] = {  # options of faster-whisper's or our class
    "faster-whisper float32": {"compute_type": "float32"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 weights": {},
    "faster-whisper int8": {"compute_type": "int8"},
    "int8": {"quantization": "int8"},
}
WORKLOADS = {"one file of 11 s": 1.0, "8 files at once": 1.5, "one long file": 1.5}  # target ratio
Transcribe = Callable[[list[Any]], list[str]]  # the samples of files -> their texts


def audio(folder: Path, workload: str, round_: int, minutes: float = 0.0) -> tuple[list[Any], list[str]]:
    """Return the samples of the files of a workload, and their texts."""
    import soundfile

    entries = [entry for entry in manifest(folder) if entry["lang"] == "en" and entry["text"]]
    files = [soundfile.read(folder / entry["file"], dtype="float32")[0] for entry in entries]
    texts = [entry["text"] for entry in entries]
    if workload.startswith("8"):
        short = sorted(range(len(files)), key=lambda i: len(files[i]))[:8]
        files, texts = [files[i] for i in short], [texts[i] for i in short]
    elif workload.startswith("one file of 11 s"):
        files, texts = files[:1], texts[:1]
    else:
        files, texts = joined(files, texts, 60 * minutes)
    return [samples * (1 - round_ / 50) for samples in files], texts


def joined(files: list[Any], texts: list[str], seconds: float) -> tuple[list[Any], list[str]]:
    """Join the files again and again, each time a little quieter, to one of at least `seconds`."""
    import numpy as np

    parts: list[Any] = []
    said: list[str] = []
    while sum(map(len, parts)) < seconds * RATE:
        at = len(parts) % len(files)
        parts.append(files[at] * (1 - len(parts) / 1000))
        said.append(texts[at])
    return [np.concatenate(parts)], [" ".join(said)]


def ours(model: Path, **options: Any) -> list[Transcribe]:
    from sensorium import LLM

    llm = LLM(model, **options)
    no_gates = dict.fromkeys(("no_speech_threshold", "log_prob_threshold", "compression_ratio_threshold"))

    def run(files: list[Any]) -> list[str]:
        items = [(samples, RATE) for samples in files]
        return [one.text for one in llm.transcribe(items, "en", use_tqdm=False, vad=False, temperature=0.0, **no_gates)]

    return [run]


def faster_whisper(model: Path, compute_type: str, many: bool, is_long: bool) -> list[Transcribe]:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    make = partial(WhisperModel, str(converted(model)), compute_type=compute_type)
    options = {"language": "en", "beam_size": 1, "temperature": 0.0, "without_timestamps": not is_long, "vad_filter": False}
    options |= dict.fromkeys(("no_speech_threshold", "log_prob_threshold", "compression_ratio_threshold"))
    one = make(cpu_threads=2)

    def text(engine: Any, samples: Any, **more: Any) -> str:
        return "".join(part.text for part in engine.transcribe(samples, **options, **more)[0])

    def batched(files: list[Any]) -> list[str]:
        ends = range(0, len(files[0]) // RATE + 1, WINDOW)
        clips = [{"start": start, "end": min(start + WINDOW, len(files[0]) / RATE)} for start in ends]
        return [text(BatchedInferencePipeline(one), files[0], batch_size=8, clip_timestamps=clips)]

    plain = partial(text, condition_on_previous_text=False)
    ways: list[Transcribe] = [lambda files: [plain(one, samples) for samples in files]]
    if many:
        two, pool = make(cpu_threads=1, num_workers=2), ThreadPoolExecutor(2)
        ways.append(lambda files: list(pool.map(partial(plain, two), files)))
    return [*ways, batched] if is_long else ways


def converted(model: Path) -> Path:
    """Return the folder of the checkpoint in CTranslate2's format, in float32; it is written once."""
    target = ROOT / "out" / f"{model.resolve().name}-ct2"
    if not target.exists():
        from ctranslate2.converters import TransformersConverter

        files = ["tokenizer.json", "preprocessor_config.json"]
        TransformersConverter(str(model), copy_files=files).convert(str(target), quantization="float32")
    return target


def measure(engine: str, workload: str, model: Path, folder: Path, rounds: int, minutes: float) -> list[dict[str, Any]]:
    """Measure in this process: seconds and texts of all rounds."""
    options = ENGINES[engine]
    if engine.startswith("faster"):
        ways = faster_whisper(model, **options, many=workload.startswith("8"), is_long="long" in workload)
    else:
        import torch

        torch.set_num_threads(2)
        ways = ours(model, **options)
    found = []
    for run in ways:
        run(audio(folder, "one file of 11 s", -1)[0])  # warm up
        for round_ in range(rounds):
            files, _ = audio(folder, workload, round_, minutes)
            start = time.perf_counter()
            heard = run(files)
            found.append({"seconds": time.perf_counter() - start, "heard": heard})
    return found


def share_of_wrong(heard: list[str], texts: list[str]) -> float:
    from training.evaluate import edits

    wanted = [words(text) for text in texts]
    return sum(edits(words(text), right) for text, right in zip(heard, wanted, strict=True)) / sum(map(len, wanted))


def child(python: str, avx2: bool, *args: str) -> list[dict[str, Any]]:
    """Run this file in a new process of an interpreter; parse the last line that it prints."""
    environment = {**os.environ, **(AVX2 | {"CT2_FORCE_CPU_ISA": "AVX2"} if avx2 else {}), "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", "-m", "benchmarks.speech", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return list(json.loads(done.stdout.splitlines()[-1]))


def version(python: str) -> str:
    command = "import faster_whisper, ctranslate2; print(faster_whisper.__version__, 'on CTranslate2', ctranslate2.__version__)"
    return subprocess.run([python, "-c", command], capture_output=True, text=True, check=True).stdout.strip()


def rows(args: argparse.Namespace) -> list[str]:
    """Return a table of seconds, of wrong words, and of our speed over the peer's of the same precision."""
    chosen = args.engine or list(ENGINES)
    lines = [
        f"| seconds (words wrong) | {' | '.join(chosen)} | float32 | 16 bits | int8 | target |",
        "|---" * (len(chosen) + 5) + "|",
    ]
    for workload, target in WORKLOADS.items():
        if args.workload and workload not in args.workload:
            continue
        best: dict[str, dict[str, Any]] = {}
        texts = audio(args.folder, workload, 0, args.minutes)[1]
        for _ in range(args.processes):
            for engine in chosen:
                python = args.peer_python if engine.startswith("faster") else sys.executable
                rounds = "1" if "long" in workload else str(args.rounds)
                asked = ["--one", engine, workload, "--rounds", rounds, "--minutes", str(args.minutes)]
                found = child(python, args.avx2, str(args.model), str(args.folder), *asked)
                for one in found:
                    one["wrong"] = share_of_wrong(one["heard"], texts)
                found += [best[engine]] if engine in best else []
                fewest = min(one["wrong"] for one in found)
                best[engine] = min((one for one in found if one["wrong"] <= fewest + SAME), key=lambda one: one["seconds"])
        times = {engine: found["seconds"] for engine, found in best.items()}
        halves = [times[engine] for engine in ("bfloat16", "float16 weights") if engine in times]
        peers = [times.get(f"faster-whisper {name}") for name in ("float32", "float32", "int8")]
        mine = [times.get("float32"), min(halves, default=None), times.get("int8")]
        ratios = [f"{a / b:.2f}x" if a and b else "-" for a, b in zip(peers, mine, strict=True)]
        shown = [f"{found['seconds']:.2f} ({found['wrong']:.1%})" for found in best.values()]
        name = f"{workload} of {args.minutes:g} minutes" if "long" in workload else workload
        lines.append(f"| {name} | {' | '.join(shown + ratios)} | {target}x |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter with faster-whisper"
    )
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only these")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these")
    parser.add_argument("--processes", type=int, default=2, help="processes of each engine and workload")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in each process; one of the long file")
    parser.add_argument("--minutes", type=float, default=20, help="length of the long file")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.model, args.folder, args.rounds, args.minutes)))
        return
    table = "\n".join([f"{machine()}, faster-whisper {version(args.peer_python)}", "", *rows(args)])
    print(table)
    if args.write:
        put(f"Whisper against faster-whisper, {'without' if args.avx2 else 'with'} AVX-512", table)


if __name__ == "__main__":
    main()
