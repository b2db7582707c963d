"""Names heard right with `boost`, and false ones: `python -m benchmarks.boosted_names MODEL`.

espeak-ng speaks 200 sentences with a rare name each (boosted_names.txt), and 200 without one. All names are boosted at once. A
name is found if the text of its sentence has it as written; any other of the names in a text is false. The clips are written to
out/boosted_names; a seed decides the voices and sentences.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.evaluate import edits

from .quality import words
from .throughput import ROOT, machine, put

SECTION = "Boosted names"
NOTE = (
    "espeak-ng speaks 200 sentences with a rare name each, and 200 sentences without one; the 200 names are boosted in all of "
    "them. Recall: sentences whose text has their name as written. Precision: names in texts that were spoken there. False: "
    "names in the sentences without one (goal: at most 1). Other words wrong: word errors of the sentences without a name. "
    "The default weight, 3, was chosen with a third of these clips."
)
FOLDER = ROOT / "out" / "boosted_names"
SEED = 11
VOICES = ("en-us", "en", "en-us+f3", "en+m3", "en-gb-x-rp+f2", "en-us+m7")
SPEEDS = (130, 150, 170)  # words per minute
WEIGHTS = (0.0, 3.0, 2.0)
CACHE = 2 << 30  # bytes for the encoder rows of all clips
WITH_NAME = (
    "Please send the contract to {} before Friday.", "I spoke with {} about it this morning.",
    "The report on {} is on your desk.", "We should ask {} for a second opinion.", "Has {} been added to the list?",
    "They finally answered the questions about {}.", "My colleague told me that {} was delayed.",
    "The meeting about {} begins at noon.", "Everybody in the office knows {} by now.", "Let me check what {} said last week.",
)  # fmt: skip
SUBJECTS = (
    "My neighbour", "The old teacher", "Our new manager", "A friend of mine", "The captain of the team",
    "The woman at the window", "His younger brother", "The doctor", "Their lawyer", "Everyone on the train",
)  # fmt: skip
ACTIONS = (
    "bought a used bicycle", "forgot to close the garden gate", "was looking for a quiet place to read",
    "wanted to talk about the price of bread", "left the keys on the kitchen table", "has planted three apple trees",
    "could not remember the name of the street", "asked for a glass of cold water", "missed the last bus to the station",
    "is waiting for an important letter",
)  # fmt: skip
TIMES = ("yesterday", "on Monday morning", "after the concert", "because it was raining", "during the holidays", "last winter")


@dataclass(frozen=True)
class Clip:
    """A spoken sentence. `name`: the boosted name in it, or an empty text."""

    text: str
    name: str
    file: Path


def clips() -> list[Clip]:
    """Write the clips that are missing, and return all of them."""
    import soundfile

    from training.asr.speech import RATE, Voice, speak

    rng = random.Random(SEED)
    names = (ROOT / "benchmarks" / "boosted_names.txt").read_text().split()
    plain = [f"{who} {what}" for who in SUBJECTS for what in ACTIONS]
    rng.shuffle(plain)
    sentences = [(rng.choice(WITH_NAME).format(name), name) for name in names]
    sentences += [(f"{plain[i % len(plain)]} {TIMES[i % len(TIMES)]}.", "") for i in range(200)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = []
    for number, (text, name) in enumerate(sentences):
        voice, file = Voice(rng.choice(VOICES), rng.choice(SPEEDS), rng.randint(35, 65)), FOLDER / f"{number:03}.flac"
        if not file.exists():
            pause = np.zeros(RATE // 4, np.float32)
            soundfile.write(file, np.concatenate((pause, speak(text, voice), pause)), RATE)
        made.append(Clip(text, name, file))
    return made


def count_names(text: str, names: Sequence[str]) -> dict[str, int]:
    """Return how often a text has each of the names as a whole word."""
    said = re.findall(r"\w+", text)
    return {name: said.count(name) for name in names if name in said}


def row(label: str, spoken: Sequence[Clip], texts: Sequence[str]) -> str:
    """Return a row of the table."""
    names = [clip.name for clip in spoken if clip.name]
    right = wrong = false = errors = total = 0
    for clip, text in zip(spoken, texts, strict=True):
        counts = count_names(text, names)
        right += clip.name in counts
        others = sum(number for name, number in counts.items() if name != clip.name)
        wrong, false = wrong + others, false + (0 if clip.name else others)
        if not clip.name:
            errors, total = errors + edits(words(text), words(clip.text)), total + len(words(clip.text))
    precision = f"{right / (right + wrong):.1%}" if right + wrong else "-"
    return f"| {label} | {right / len(names):.1%} | {precision} | {false} | {errors} of {total} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    from sensorium import LLM

    spoken = clips()
    files, names = [str(clip.file) for clip in spoken], [clip.name for clip in spoken if clip.name]
    lines = ["| weight | recall | precision | false | other words wrong |", "|---|---|---|---|---|"]
    with LLM(args.model, device="cpu", dtype="float32", encoder_cache_bytes=CACHE) as llm:
        for weight in WEIGHTS:
            boost = [(name, weight) for name in names] if weight else []
            found = llm.transcribe(files, boost=boost, use_tqdm=False)
            lines.append(row(str(weight or "none"), spoken, [one.text for one in found]))
            print(lines[-1], flush=True)
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
