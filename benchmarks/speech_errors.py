"""Errors of transcripts by kind, in every mode: `python -m benchmarks.speech_errors FOLDER whisper-tiny.en=CT2 tiny-asr`.

A model is a folder of a Whisper checkpoint; after "=" comes the folder in which CTranslate2 stores the same model. The sets of
clips: the English recordings of FOLDER (with manifest.jsonl), six of them joined without pauses, sounds without speech, spoken
numbers (benchmarks.spoken_numbers) and sentences with rare names (benchmarks.boosted_names). Texts are appended to --log, and a
run continues where the last one ended. --peer-python is an interpreter with faster-whisper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import boosted_names, spoken_numbers
from .live import run_in_step
from .seams import CLIPS, edits
from .throughput import ROOT, machine, put
from .whisper_peer import manifest

SECTION = "Errors of speech"
NOTE = (
    "Words of what was said: wrong ones, lost ones, doubled ones (repeated next to where they were said) and invented ones, "
    "after Whisper's normaliser for English, in which each digit and each spelled letter is a word. All decode in float32 with "
    "one beam and otherwise default options. Modes: each file by itself, all files in one call, one window after another "
    "(`sequential`; in transformers and faster-whisper the default for long files), and live, with a pass per second of audio. "
    "A batch of transformers is its pipeline with `chunk_length_s=30`, which joins the texts of overlapping windows. "
    "Recordings: {recordings}. Joined: six recordings and a synthetic one without pauses between them, in random order, 4 "
    "minutes. No speech: silence, noise, hum, a dial tone and chords, where every word is invented. Numbers: the first {count} "
    "clips of the set of spoken numbers; names: as many sentences with a rare name."
)
FOLDER = ROOT / "out" / "speech_errors"
RATE = 16_000
COUNT, SECONDS = 60, 240
SYSTEMS = {
    "sensorium": ("file", "batch", "sequential", "live"),
    "faster-whisper": ("sequential", "batch"),
    "transformers": ("sequential", "batch"),
}
PEER = """
import json, sys
from faster_whisper import BatchedInferencePipeline, WhisperModel

model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32", cpu_threads=2)
options = {"language": "en", "beam_size": 1}
if sys.argv[2] == "batch":
    model, options = BatchedInferencePipeline(model), options | {"batch_size": 8}
for file in json.load(sys.stdin):
    print(json.dumps("".join(part.text for part in model.transcribe(file, **options)[0])), flush=True)
"""


@dataclass(frozen=True)
class Clip:
    """A file and what is said in it. `kind`: its set. `name`: the rare name in it, or an empty text."""

    kind: str
    file: Path
    text: str
    name: str = ""


@dataclass(frozen=True)
class Errors:
    """Numbers of words: those that were said, and errors by kind."""

    said: int = 0
    wrong: int = 0
    lost: int = 0
    doubled: int = 0
    invented: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def all(self) -> int:
        return self.wrong + self.lost + self.doubled + self.invented


def count_errors(said: Sequence[str], heard: Sequence[str]) -> Errors:
    """Return the errors by kind. Words that are too many are doubled if they repeat those before or after them."""
    total = Errors(len(said))
    for start, end, first, last in edits(said, heard):
        more, words = (last - first) - (end - start), heard[first:last]
        total += Errors(wrong=min(end - start, last - first), lost=max(0, -more))
        near = (heard[max(0, first - len(words)) : first], heard[last : last + len(words)])
        is_doubled = start == end and any(list(part) == list(words) for part in near)
        total += Errors(doubled=more) if is_doubled else Errors(invented=max(0, more))
    return total


def clips(folder: Path, count: int) -> Iterator[Clip]:
    """Yield the clips of all sets; those that are missing are made."""
    entries = manifest(folder)
    for entry in entries:
        if entry["lang"] == "en":
            yield Clip("recordings", folder / entry["file"], entry["text"])
    FOLDER.mkdir(parents=True, exist_ok=True)
    yield joined({entry["file"]: entry["text"] for entry in entries}, folder)
    yield from (Clip("no speech", folder / entry["file"], "") for entry in entries if not entry["text"])
    yield from (Clip("no speech", written(name, samples), "") for name, samples in sounds())
    spoken_numbers.FOLDER.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(spoken_numbers.cases()[:count]):
        file = spoken_numbers.FOLDER / f"{number:03}.wav"
        if not file.exists():
            spoken_numbers.speak(case, file)
        yield Clip("numbers", file, case.text)
    for clip in boosted_names.clips()[:count]:
        yield Clip("names", clip.file, clip.text, clip.name)


def written(name: str, samples: np.ndarray) -> Path:
    import soundfile

    file = FOLDER / f"{name}.flac"
    if not file.exists():
        soundfile.write(file, samples, RATE)
    return file


def joined(texts: dict[str, str], folder: Path) -> Clip:
    import soundfile

    shuffle, order, total = random.Random(0), list[str](), 0
    sounds = {name: soundfile.read(folder / f"{name}.flac", dtype="float32")[0] for name in CLIPS}
    while total < SECONDS * RATE:
        shuffle.shuffle(part := list(CLIPS))
        order += part
        total += sum(len(sounds[name]) for name in part)
    file = written("joined", np.concatenate([sounds[name] for name in order]))
    return Clip("joined", file, " ".join(texts[f"{name}.flac"] for name in order))


def sounds() -> Iterator[tuple[str, np.ndarray]]:
    """Yield sounds of 20 s without speech."""
    times = np.arange(20 * RATE) / RATE
    yield "hum", 0.05 * sum(np.sin(2 * np.pi * 50 * n * times) / n for n in (1, 2, 3))
    yield "dial", 0.1 * (np.sin(2 * np.pi * 350 * times) + np.sin(2 * np.pi * 440 * times))
    roots = 220 * 2 ** (np.array([0, 5, 7, 3])[(times // 1).astype(int) % 4] / 12)
    yield "chords", 0.05 * np.exp(-2 * (times % 1)) * sum(np.sin(2 * np.pi * roots * r * times) for r in (1, 1.25, 1.5))


def ours(model: Path, mode: str, files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of the files. Raise RuntimeError for one that cannot be transcribed."""
    from sensorium import LLM

    options: dict[str, Any] = {"sequential": True, "timestamps": "segment"} if mode == "sequential" else {}
    with LLM(model, device="cpu", dtype="float32") as llm:
        for part in [files] if mode == "batch" else [[file] for file in files]:
            for transcript in llm.transcribe(list(map(str, part)), "en", use_tqdm=False, **options):
                if transcript.error is not None:
                    raise RuntimeError(f"{transcript.source}: {transcript.error}")
                yield transcript.text


async def live(model: Path, files: Sequence[Path], log: Callable[[str], None]) -> None:
    """Log the final text of each file as a stream."""
    import soundfile
    from sensorium import AsyncLLM
    from sensorium.pipelines.speech.options import LiveOptions

    async with AsyncLLM(model, device="cpu", dtype="float32") as llm:
        for file in files:
            samples, rate = soundfile.read(file, dtype="float32")
            events = await run_in_step(llm, samples, LiveOptions(language="en", rate=rate))
            log(" ".join(event.text for event in events if event.kind == "final"))


def faster_whisper(python: str, model: Path, mode: str, files: Sequence[Path]) -> Iterator[str]:
    command = [python, "-c", PEER, str(model), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(list(map(str, files))))
        process.stdin.close()
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"faster-whisper ended with {process.returncode}")


def transformers(model: Path, mode: str, files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of its pipeline: windows of 30 s that overlap, as one batch, or its generation for long files."""
    import soundfile
    import soxr

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    from transformers import WhisperForConditionalGeneration, WhisperProcessor, pipeline

    parts = (
        WhisperForConditionalGeneration.from_pretrained(model, dtype="float32").eval(),
        WhisperProcessor.from_pretrained(model),
    )
    options = {"chunk_length_s": 30, "batch_size": 8} if mode == "batch" else {}
    recognize = pipeline(
        "automatic-speech-recognition", parts[0], tokenizer=parts[1].tokenizer, feature_extractor=parts[1].feature_extractor
    )
    for file in files:
        samples, rate = soundfile.read(file, dtype="float32")
        inputs = {"raw": soxr.resample(samples, rate, RATE), "sampling_rate": RATE}
        yield recognize(inputs, return_timestamps=mode == "sequential" and len(samples) > 30 * rate, **options)["text"]


def read_log(file: Path) -> dict[str, dict[str, str]]:
    """Return the texts of each "model, system, mode" by file."""
    texts = dict[str, dict[str, str]]()
    for line in file.read_text("utf-8").splitlines() if file.exists() else []:
        row = json.loads(line)
        texts.setdefault(row["name"], {})[row["file"]] = row["text"]
    return texts


def table(texts: dict[str, dict[str, str]], spoken: Sequence[Clip]) -> list[str]:
    """Return the rows of the table for those names that have a text of every clip."""
    split, lines = spoken_numbers.normaliser(), list[str]()
    lines.append("| clips | model, system, mode | words | wrong | lost | doubled | invented | all | names |")
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for kind in dict.fromkeys(clip.kind for clip in spoken):
        clips = [clip for clip in spoken if clip.kind == kind]
        for name, text_of in texts.items():
            if not all(str(clip.file) in text_of for clip in clips):
                continue
            heard = [text_of[str(clip.file)] for clip in clips]
            pairs = list(zip(clips, heard, strict=True))
            total = sum((count_errors(split(clip.text), split(text)) for clip, text in pairs), Errors())
            right = [bool(clip.name and re.search(rf"\b{clip.name}\b", text)) for clip, text in pairs]
            names = f"{sum(right)} of {len(clips)}" if kind == "names" else ""
            cells = " | ".join(map(str, (*astuple(total), total.all, names)))
            lines.append(f"| {kind} | {name} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="recordings with manifest.jsonl")
    parser.add_argument("models", nargs="+", help="DIR or DIR=CT2")
    parser.add_argument(
        "--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter with faster-whisper"
    )
    parser.add_argument("--count", type=int, default=COUNT, help="clips with numbers, and with names")
    parser.add_argument("--log", type=Path, default=FOLDER / "texts.jsonl")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    spoken = list(clips(args.folder, args.count))
    texts = read_log(args.log)
    for given in args.models:
        model, _, peer = given.partition("=")
        for system, modes in SYSTEMS.items():
            if system != "faster-whisper" or (peer and args.peer_python):
                for mode in modes:
                    name = f"{Path(model).name}, {system}, {mode}"
                    transcribe(args, Path(model), Path(peer), (system, mode), texts.setdefault(name, {}), name, spoken)
    names = [f"{Path(given.partition('=')[0]).name}, " for given in args.models]
    lines = table({name: own for name, own in texts.items() if name.startswith(tuple(names))}, spoken)
    print("\n".join(lines))
    if args.write:
        recordings = ", ".join(clip.file.stem for clip in spoken if clip.kind == "recordings")
        note = NOTE.format(recordings=recordings, count=args.count)
        put(SECTION, "\n".join([machine(), "", note, "", *lines]))


def transcribe(
    args: argparse.Namespace,
    model: Path,
    peer: Path,
    way: tuple[str, str],
    done: dict[str, str],
    name: str,
    spoken: Sequence[Clip],
) -> None:
    """Add the missing texts of a system and mode to `done` and to the log."""
    (system, mode), files = way, [clip.file for clip in spoken if str(clip.file) not in done]
    left = iter(files)

    def log(text: str) -> None:
        file = str(next(left))
        done[file] = text
        with args.log.open("a") as lines:
            lines.write(json.dumps({"name": name, "file": file, "text": text}) + "\n")

    if not files:
        return
    print(f"{name}: {len(files)} files", flush=True)
    if system == "sensorium" and mode == "live":
        asyncio.run(live(model, files, log))
        return
    programs = {"sensorium": partial(ours, model), "transformers": partial(transformers, model)}
    program = programs.get(system, partial(faster_whisper, args.peer_python, peer))
    for text in program(mode, files):
        log(text)


if __name__ == "__main__":
    main()
