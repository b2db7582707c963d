"""Answers of tiny-vl and of a Whisper model with quantised weights or KV cache: `python -m benchmarks.quality --write`."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from .throughput import ROOT, machine, put

SECTION = "Quality in 16, 8 and 4 bits"
NOTE = (
    "Character accuracy (videos: share of correct directions; speech: share of correct words) and the number of answers equal "
    'to those of float32. int8: `quantization="int8"`. int4: written by `sensorium quantize` with groups of 32 inputs, rounded '
    "to nearest (RTN) or scaled on 128 samples that are not in the sets (AWQ, not for decoders with cross-attention). "
    "Target of 8 bits: a drop of at most half a point."
)
WANTED = 0.005  # largest allowed drop of character accuracy in 8 bits
GROUP = 32
CALIBRATION = {"text": 64, "receipt": 32, "clip": 32}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "fp8 cache": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "int4, RTN": {"dtype": "float32"},
    "int4, AWQ": {"dtype": "float32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "tiny-vl")
    parser.add_argument("--share", type=float, default=1.0, help="part of each held-out set to run")
    parser.add_argument("--whisper", type=Path, help="folder of an English Whisper model")
    parser.add_argument("--speech", type=Path, help="folder with manifest.jsonl: file, text, lang, kind")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = held_out_rows(args.model, args.share, Path(folder))
        if args.whisper and args.speech:
            rows += speech_rows(args.whisper, args.speech)
    lines = [f"| set | samples | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS), *rows]
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


def held_out_rows(model: Path, share: float, folder: Path) -> list[str]:
    """Run the held-out sets of tiny-vl; shuffled frames are left out, since they check the data."""
    from sensorium import LLM
    from sensorium.engine.setup.quantize import quantize_checkpoint
    from sensorium.pipelines.calibration import run_prompts

    from training.data import held_out
    from training.evaluate import ours, request, score, tasks

    samples = [request(sample) for kind, count in CALIBRATION.items() for sample in held_out(kind, count, seed=1)]
    folders = {"int4, RTN": folder / "rtn", "int4, AWQ": folder / "awq"}
    for out, calibrate in zip(folders.values(), (None, partial(run_prompts, str(model), len(samples), samples)), strict=True):
        quantize_checkpoint(str(model), out, GROUP, print, calibrate)
    sets = [task for task in tasks(share) if not task.below]
    found: dict[str, list[list[str]]] = {}
    for way, options in WAYS.items():
        with LLM(folders.get(way, model), device="cpu", **options) as llm:
            found[way] = [ours(llm, task.samples) for task in sets]
        print(way, *(f"{score(task.samples, answers):.2%}" for task, answers in zip(sets, found[way], strict=True)), flush=True)
    return [
        row(task.name, {way: (score(task.samples, answers[i]), answers[i]) for way, answers in found.items()})
        for i, task in enumerate(sets)
    ]


def speech_rows(model: Path, folder: Path) -> list[str]:
    """Transcribe the English speech of a folder; the decoder's weights are rounded while they are loaded."""
    from sensorium import LLM

    from training.evaluate import edits

    entries = [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]
    entries = [entry for entry in entries if entry["lang"] == "en" and entry["text"]]
    wanted, audio = [words(entry["text"]) for entry in entries], [str(folder / entry["file"]) for entry in entries]
    loaded = {"int4, RTN": {"quantization": {"method": "int4", "group_size": GROUP}}}
    cells = {}
    for way, options in WAYS.items():
        if way == "int4, AWQ":
            continue
        with LLM(model, device="cpu", **options, **loaded.get(way, {})) as llm:
            texts = [one.text for one in llm.transcribe(audio, "en", use_tqdm=False, temperature=0.0)]
        wrong = sum(edits(words(text), right) for text, right in zip(texts, wanted, strict=True))
        cells[way] = (1 - wrong / sum(map(len, wanted)), texts)
        print(way, f"{cells[way][0]:.2%}", flush=True)
    return [row(f"speech, {model.resolve().name}", cells)]


def words(text: str) -> list[str]:
    return re.sub(r"[^\w\s']", " ", text.lower()).split()


def row(name: str, cells: dict[str, tuple[float, list[str]]]) -> str:
    """Format one line of the table: accuracy, and answers equal to those of float32."""
    best, exact = cells["float32"]
    texts = [f"{best:.2%}"]
    for way in list(WAYS)[1:]:
        if way not in cells:
            texts.append("")
            continue
        reached, answers = cells[way]
        same, missed = sum(a == b for a, b in zip(answers, exact, strict=True)), "8" in way and best - reached > WANTED
        texts.append(f"{reached:.2%}, {same} the same{' (missed)' if missed else ''}")
    return f"| {name} | {len(exact)} | {' | '.join(texts)} |"


if __name__ == "__main__":
    main()
