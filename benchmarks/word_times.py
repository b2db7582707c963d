"""Times of words here and in other implementations: `python -m benchmarks.word_times MODEL FOLDER --peer CT2`.

MODEL is a Whisper checkpoint, FOLDER has manifest.jsonl with file, text, lang and duration. CT2 is the model as CTranslate2
stores it, and --peer-python an interpreter with faster-whisper. All decode greedily in float32. Words are compared where both
texts have the same ones in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median
from typing import Any

from .quality import words
from .throughput import ROOT, machine, put
from .whisper_peer import arguments, manifest, peer

SECTION = "Times of words"
NOTE = (
    "Differences of the starts and ends of words from those of other implementations, of the English clips with speech; with "
    "transformers, of those of at most 30 s. All read the cross-attention of the same heads; each mends implausibly long words "
    "in its own way. Goal: a median of at most 80 ms."
)
GOAL = 0.08  # seconds
WINDOW = 30.0  # seconds; longest clip for transformers
PEER = """
import json, sys
from faster_whisper import WhisperModel

model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32")
options = {"language": "en", "beam_size": 1, "word_timestamps": True, "condition_on_previous_text": False}
found = [
    [(word.start, word.end, word.word) for part in model.transcribe(file, **options)[0] for word in part.words]
    for file in sys.argv[2:]
]
print(json.dumps(found))
"""
Times = list[tuple[float, float, str]]  # start, end and text of each word


def main() -> None:
    args = arguments(__doc__)
    entries = [entry for entry in manifest(args.folder) if entry["lang"] == "en" and entry["text"]]
    files = [str(args.folder / entry["file"]) for entry in entries]
    found = ours(args.model, files)
    short = [file for file, entry in zip(files, entries, strict=True) if entry["duration"] <= WINDOW]
    references = {"transformers": transformers(args.model, short)}
    if args.peer:
        references["faster-whisper"] = dict(zip(files, peer(args, PEER, *files), strict=True))
    lines = table(found, references)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([f"{machine()}; {args.model.name} in float32", "", NOTE, "", *lines]))


def ours(model: Path, files: list[str]) -> dict[str, Times]:
    from sensorium import LLM

    with LLM(model, device="cpu", dtype="float32") as llm:
        heard = llm.transcribe(files, "en", timestamps="word", use_tqdm=False)
    return {
        file: [(word.start, word.end, word.word) for part in one.segments or () for word in part.words or ()]
        for file, one in zip(files, heard, strict=True)
    }


def transformers(model: Path, files: list[str]) -> dict[str, Times]:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    import soundfile
    from transformers import pipeline

    run: Any = pipeline("automatic-speech-recognition", str(model), dtype="float32", device="cpu")
    found = {}
    for file in files:
        samples, rate = soundfile.read(file, dtype="float32")
        heard = run({"raw": samples, "sampling_rate": rate}, return_timestamps="word", generate_kwargs={"num_beams": 1})
        found[file] = [(*one["timestamp"], one["text"]) for one in heard["chunks"] if None not in one["timestamp"]]
    return found


def pairs(own: Times, other: Times) -> list[tuple[float, float]]:
    """Return the differences of the starts and of the ends of words that both texts have, in seconds."""
    places = same_words(*([word for *_, word in one] for one in (own, other)))
    return [(abs(own[a][0] - other[b][0]), abs(own[a][1] - other[b][1])) for a, b in places]


def same_words(own: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of the words that both texts have in the same order, without capitals and punctuation."""
    left, right = (["".join(words(word)) for word in one] for one in (own, other))
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def table(found: dict[str, Times], references: dict[str, dict[str, Times]]) -> list[str]:
    """Return the rows of the table. `references`: for each implementation, the words of each file."""
    head = "starts, median | within 80 ms | 95 % within | ends, median | within 80 ms"
    lines = [f"| reference | clips | words | compared | {head} |", "|---" * 9 + "|"]
    for name, files in references.items():
        same = [pair for file, other in files.items() for pair in pairs(found[file], other)]
        starts, ends = (sorted(values) for values in zip(*same, strict=True))
        count, missed = sum(map(len, files.values())), " (missed)" if median(starts) > GOAL else ""
        near = [f"{sum(value <= GOAL for value in values) / len(values):.0%}" for values in (starts, ends)]
        most = starts[int(0.95 * len(starts))]
        times = f"{_ms(median(starts))}{missed} | {near[0]} | {_ms(most)} | {_ms(median(ends))} | {near[1]}"
        lines.append(f"| {name} | {len(files)} | {count} | {len(same)} | {times} |")
    return lines


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    main()
