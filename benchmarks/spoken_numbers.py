"""Words wrong in spoken numbers, here and in faster-whisper: `python -m benchmarks.spoken_numbers MODEL --peer CT2`.

The clips are numbers, amounts, dates, times, telephone numbers, codes and spelled names, alone and in sentences. espeak-ng
speaks them in several voices and at several speeds; a seed decides everything. They are written to out/spoken_numbers.

CT2 is the model as CTranslate2 stores it, and --peer-python an interpreter with faster-whisper. Both systems decode in float32
with their default options. Texts are kept in a log beside the clips, and a run continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.evaluate import edits

from .throughput import ROOT, machine, put

SECTION = "Spoken numbers"
NOTE = (
    "espeak-ng speaks numbers, amounts, dates, times, telephone numbers, codes and spelled names. What was said and what was "
    "heard are normalised by Whisper's normaliser for English; then each digit and each spelled letter is a word. Both systems "
    "decode in float32 with their default options. Each row is of the first clips of the set, equally many of each kind. "
    "sensorium pads a short window with silence, as transformers does, and faster-whisper pads its spectrogram with zeros. "
    "This is the cause of most misses of whisper-base, not of whisper-tiny.en: in the first 40 clips, with 1 beam and without "
    "the search for skipped speech, it has 55 words wrong with silence, 49 with such zeros and 44 with zeros and timestamps "
    "(faster-whisper 46), whisper-tiny.en 69, 84 and 81 (faster-whisper 68). Goal: at most as many words wrong as "
    "faster-whisper."
)
FOLDER = ROOT / "out" / "spoken_numbers"
COUNT, SEED = 200, 7
BEAMS = (1, 5)
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3", "en-gb-scotland", "en-gb-x-rp+f2", "en-us+m7")
SPEEDS = (120, 140, 160, 175)  # words per minute
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
ORDINALS = [
    "_",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
]
NAMES = [
    "Smith",
    "Keller",
    "Nguyen",
    "Okafor",
    "Ramirez",
    "Schwartz",
    "Petrov",
    "Yamada",
    "Lindqvist",
    "Douglas",
    "Baxter",
    "Quigley",
]
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
UNITS = ["kilograms", "kilometres", "miles", "litres", "metres", "degrees", "hours", "seconds"]
PEER = """
import json, sys
from faster_whisper import WhisperModel

model, size = WhisperModel(sys.argv[1], device="cpu", compute_type="float32"), int(sys.argv[2])
for file in json.load(sys.stdin):
    print(json.dumps("".join(part.text for part in model.transcribe(file, language="en", beam_size=size)[0])), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A clip: its text, and the voice and speed with which espeak-ng says it."""

    kind: str
    text: str
    voice: str
    speed: int


def number_words(value: int) -> str:
    """Return a cardinal number in English words."""
    if value < 20:
        return ONES[value]
    if value < 100:
        return TENS[value // 10] + (f" {ONES[value % 10]}" if value % 10 else "")
    for size, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if value >= size:
            rest = f" {number_words(value % size)}" if value % size else ""
            return f"{number_words(value // size)} {name}{rest}"
    raise AssertionError


def digits(value: str) -> str:
    return " ".join(ONES[int(digit)] for digit in value)


def year(chance: random.Random) -> str:
    value = chance.choice([chance.randint(1811, 1999), chance.randint(2011, 2039)])
    return f"{number_words(value // 100)} {number_words(value % 100) if value % 100 > 9 else 'oh ' + ONES[value % 10]}"


def day(chance: random.Random) -> str:
    return ORDINALS[chance.randint(1, 20)]


def amount(chance: random.Random) -> str:
    whole, part = chance.randint(20, 9_999), chance.randint(10, 99)
    return f"{number_words(whole)} dollars and {number_words(part)} cents"


def telephone(chance: random.Random) -> str:
    groups = chance.choice([(3, 3, 4), (4, 3, 3), (2, 4, 4), (3, 4)])
    return ", ".join(digits("".join(chance.choices("0123456789", k=size))) for size in groups)


def code(chance: random.Random) -> str:
    return ", ".join(chance.choice(LETTERS) if chance.random() < 0.4 else digits(chance.choice("23456789")) for _ in range(7))


def clock(chance: random.Random) -> str:
    minute = chance.choice([15, 20, 25, 30, 35, 45, 50, 55, 12, 48])
    return f"{number_words(chance.randint(1, 12))} {number_words(minute)} {chance.choice(['A M', 'P M'])}"


def decimal(chance: random.Random) -> str:
    return (
        f"{number_words(chance.randint(0, 99))} point {digits(''.join(chance.choices('0123456789', k=chance.randint(1, 4))))}"
    )


def spelled(chance: random.Random) -> str:
    name = chance.choice(NAMES)
    return f"{name}, {', '.join(name.upper())}"


def integer(chance: random.Random) -> str:
    return number_words(chance.choice([chance.randint(100, 99_999), chance.randint(100_000, 9_999_999)]))


def sentence(chance: random.Random, kind: str, value: str) -> str:
    """Return the value alone, or in a sentence."""
    forms = {
        "integer": ["{}.", "The city has {} inhabitants.", "They counted {} votes in the first round."],
        "decimal": ["{}.", "The measured value is {}.", "Multiply the result by {}."],
        "amount": ["{}.", "The invoice total is {}.", "We paid {} for the repair last week."],
        "date": ["{}.", "The contract was signed on {}.", "Her appointment is on {}."],
        "time": ["{}.", "The train leaves at {}.", "The meeting was moved to {} tomorrow."],
        "percentage": ["{}.", "Sales went up by {} in the last quarter.", "The interest rate is {}."],
        "telephone": ["{}.", "My telephone number is {}.", "Please call {}."],
        "code": ["{}.", "The confirmation code is {}.", "Enter the serial number {}."],
        "spelled": ["{}.", "The last name is {}.", "It is booked for {}."],
        "measure": ["{}.", "The parcel measures {}.", "We need {} in total."],
    }
    return chance.choice(forms[kind]).format(value)


VALUES: dict[str, Callable[[random.Random], str]] = {
    "integer": integer,
    "decimal": decimal,
    "amount": amount,
    "date": lambda chance: f"{chance.choice(MONTHS)} {day(chance)}, {year(chance)}",
    "time": clock,
    "percentage": lambda chance: f"{decimal(chance)} percent",
    "telephone": telephone,
    "code": code,
    "spelled": spelled,
    "measure": lambda chance: f"{integer(chance)} {chance.choice(UNITS)}",
}


def cases(count: int = COUNT, seed: int = SEED) -> list[Case]:
    """Return as many cases of each kind, in turn. Every fourth one says two values."""
    chance, kinds, result = random.Random(seed), list(VALUES), list[Case]()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        text = sentence(chance, kind, VALUES[kind](chance))
        if number % 4 == 3:
            other = kinds[(number // 4) % len(kinds)]
            text = f"{text} {sentence(chance, other, VALUES[other](chance))}"
        result.append(Case(kind, text, chance.choice(VOICES), chance.choice(SPEEDS)))
    return result


def speak(case: Case, file: Path) -> None:
    command = ["espeak-ng", "-v", case.voice, "-s", str(case.speed), "-g", "2", "-w", str(file), case.text]
    subprocess.run(command, check=True, capture_output=True)


def normaliser() -> Callable[[str], list[str]]:
    """Return a function that splits a text into normalised words, digits and spelled letters."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalize = EnglishTextNormalizer({})

    def split(text: str) -> list[str]:
        text = re.sub(r"(?<=\b\w)-(?=\w\b)", " ", text)  # S-M-I-T-H
        text = re.sub(r"\b[A-Z]{2,}\b", lambda match: " ".join(match[0]), text)
        text = re.sub(r"(?<=\d)\s?([ap])\.?\s?m\b\.?", r" \1 m ", text, flags=re.IGNORECASE)
        text = re.sub(r"(?<=\d)(?=[A-Za-z])(?!st|nd|rd|th)|(?<=[A-Z])(?=\d)", " ", text)
        normalised = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", normalize(text))
        return re.findall(r"\d|[^\W\d_]+|%", normalised)

    return split


def table(rows: dict[str, list[str]], expected: Sequence[list[str]], clips: Sequence[Case], split: Any) -> list[str]:
    """Return the rows of the table. `rows`: the texts of each system and number of beams, as "model, beams, system"."""
    lines = ["| model, beams, system | clips | words | wrong | by kind |", "|---|---|---|---|---|"]
    for name, texts in rows.items():
        wrong = [edits(split(text), right) for text, right in zip(texts, expected, strict=False)]
        kinds = {kind: sum(n for n, case in zip(wrong, clips, strict=False) if case.kind == kind) for kind in VALUES}
        total, by_kind = sum(map(len, expected[: len(texts)])), ", ".join(f"{kind} {n}" for kind, n in kinds.items() if n)
        lines.append(f"| {name} | {len(texts)} | {total} | {sum(wrong)} | {by_kind} |")
    return lines


def ours(model: Path, files: Sequence[Path], beams: int, log: Callable[[str], None]) -> None:
    from sensorium import LLM

    with LLM(model, device="cpu", dtype="float32") as llm:
        for file in files:
            (transcript,) = llm.transcribe(file, language="en", beam_size=beams, use_tqdm=False)
            if transcript.error:
                raise RuntimeError(f"{file}: {transcript.error}")
            log(transcript.text)


def peers(args: argparse.Namespace, files: Sequence[Path], beams: int, log: Callable[[str], None]) -> None:
    command = [args.peer_python, "-c", PEER, str(args.peer), str(beams)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(list(map(str, files))))
        process.stdin.close()
        for line in process.stdout:
            log(json.loads(line))
    if process.returncode:
        raise RuntimeError(f"faster-whisper ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="folder of the CTranslate2 model")
    parser.add_argument(
        "--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter with faster-whisper"
    )
    parser.add_argument("--count", type=int, default=COUNT, help="the first clips of the set")
    parser.add_argument("--beams", type=int, nargs="*", default=list(BEAMS))
    parser.add_argument("--log", type=Path, default=FOLDER / "texts.jsonl")
    parser.add_argument("--show", action="store_true", help="print the texts that differ between the systems")
    parser.add_argument("--write", action="store_true", help="put the table of the log into benchmarks/README.md")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    clips = cases()[: args.count]
    files = [FOLDER / f"{number:03}.wav" for number in range(len(clips))]
    for case, file in zip(clips, files, strict=True):
        if not file.exists():
            speak(case, file)
    texts_by_name = read_log(args.log)
    for beams in args.beams:
        for system in ("sensorium", "faster-whisper") if args.peer else ("sensorium",):
            name = f"{args.model.name}, {beams}, {system}"
            done = texts_by_name.setdefault(name, [])

            def log(text: str, name: str = name, done: list[str] = done) -> None:
                done.append(text)
                with args.log.open("a") as file:
                    file.write(json.dumps({"name": name, "text": text}) + "\n")

            left = files[len(done) :]
            if left and system == "sensorium":
                ours(args.model, left, beams, log)
            elif left:
                peers(args, left, beams, log)
    report(args, texts_by_name, clips)


def read_log(file: Path) -> dict[str, list[str]]:
    """Return the texts of each "model, beams, system", in the order of the clips."""
    texts_by_name = dict[str, list[str]]()
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        texts_by_name.setdefault(row["name"], []).append(row["text"])
    return texts_by_name


def report(args: argparse.Namespace, texts_by_name: dict[str, list[str]], clips: Sequence[Case]) -> None:
    split = normaliser()
    expected = [split(case.text) for case in clips]
    lines = table({name: texts[: len(clips)] for name, texts in texts_by_name.items()}, expected, clips, split)
    print("\n".join(lines))
    if args.show:
        for number, case in enumerate(clips):
            texts = {name: rows[number] for name, rows in texts_by_name.items() if len(rows) > number}
            counts = {name: edits(split(text), expected[number]) for name, text in texts.items()}
            if len(set(counts.values())) > 1:
                print(number, case.text, *(f"\n    {counts[name]} {name}: {text}" for name, text in texts.items()))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
