"""Compare times of words with those that espeak-ng reports: `python -m benchmarks.ctc_alignment MODEL --write`.

MODEL is the folder of a CTC model trained on espeak-ng's English; `python -m training.asr.ctc` trains one in 42 minutes.
tiny-asr writes the text, and only words that it wrote correctly are compared. The first rows of the table have the times from
MODEL (as `aligner=`), the last ones those from tiny-asr's alignment heads.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from training.asr.dataset import SPOKEN
from training.asr.grammar import utterance
from training.asr.speech import RATE, UNSEEN_VARIANT, WINDOW, Espeak, Voice, degrade, random_voice, reverberate
from training.reference import transformers

from .throughput import ROOT, machine, put
from .word_times import GOAL, same_words

SECTION = "Times of words from a CTC model"
NOTE = (
    "Errors of the times of words, compared with the times at which espeak-ng begins each word and each pause. `aligner` is a "
    "Wav2Vec2ForCTC of a million parameters, which `python -m training.asr.ctc` trained on espeak-ng's speech alone; tiny-asr "
    "wrote the text. The voice of these clips is not in the training data, nor are pauses in sentences. The sentences are of "
    "the same grammar: short ones occur in training, too. Goal: a median of at most 80 ms."
)
CLEAN, NOISE, PAUSES = SETS = ("clean", "noise and rooms", "pauses between words")
COUNT = 100  # clips of a set
SEED = 10_000_019  # training uses other seeds
WORD, PHONEME = 1, 7  # kinds of events
COMMAS = 0.3  # share of words in the third set that get a comma, which espeak-ng speaks as a pause


class Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h. `place`: of a word's first character in the text, from 1."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("message", ctypes.c_uint),
        ("place", ctypes.c_int),
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )


@dataclass(frozen=True)
class Spoken:
    """A word of a clip. It ends where a pause (then `paused`) or the next word begins.

    `start` or `end` is None where espeak-ng reports one event for several words.
    """

    word: str
    start: float | None
    end: float | None
    paused: bool


@dataclass(frozen=True)
class Clip:
    samples: np.ndarray
    words: list[Spoken]


@dataclass
class Errors:
    """Signed errors in seconds, positive if the time is late."""

    compared: int = 0
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ends_before_pauses: list[float] = field(default_factory=list)


class Speaker(Espeak):
    """Keeps the events of the last text: kind, place, length, seconds and name."""

    def _receive(self, samples: int | None, count: int, events: int | None) -> int:
        own, i = ctypes.cast(events or 0, ctypes.POINTER(Event)), 0
        while own and own[i].kind:
            one, i = own[i], i + 1
            self.events.append((one.kind, one.place, one.length, one.sample / self.rate, one.name))
        return super()._receive(samples, count, events)

    def words(self, text: str, voice: Voice) -> tuple[np.ndarray, list[Spoken]]:
        """Return samples at RATE, and the words.

        espeak-ng joins some words to the one before, such as "the" to "in", and reports one event for both.
        """
        self.events = list[tuple[int, int, int, float, bytes]]()
        samples = soxr.resample(self.speak(text, voice), self.rate, RATE)
        marks = list[tuple[float, int]]()  # start in seconds, and index of the word; -1: a pause
        for kind, place, length, seconds, name in self.events:
            if kind == WORD and length:
                marks.append((seconds, text.count(" ", 0, place)))
            elif kind == PHONEME and name.startswith(b"_"):
                marks.append((seconds, -1))
        found = [Spoken(word, None, None, False) for word in text.split()]
        heads = [at for at, (_, number) in enumerate(marks) if number >= 0]
        for at, after in pairwise([*heads, len(marks)]):
            start, first = marks[at]
            last = (marks[after][1] if after < len(marks) else len(found)) - 1
            end, following = marks[at + 1]
            found[first] = replace(found[first], start=start)
            found[last] = replace(found[last], end=end, paused=following < 0)
        return samples, found


def make_clips(name: str, speaker: Speaker, count: int) -> list[Clip]:
    """Return the clips of a set. They are the same in every run with the same version of espeak-ng."""
    rng, found = np.random.default_rng([SEED, SETS.index(name)]), list[Clip]()
    shares = np.array(list(SPOKEN.values()))
    while len(found) < count:
        text = utterance(rng, str(rng.choice(list(SPOKEN), p=shares / shares.sum())))
        if name == PAUSES:
            text = " ".join(word + "," * (rng.random() < COMMAS) for word in text[:-1].split()).rstrip(",") + text[-1]
        samples, spoken = speaker.words(text, random_voice(rng, (UNSEEN_VARIANT,)))
        before, after = (int(RATE * rng.uniform(0.05, 0.6)) for _ in range(2))
        samples = np.pad(samples, (before, after))
        if len(samples) > WINDOW:
            continue
        if name == NOISE:
            samples = degrade(reverberate(samples, rng) if rng.random() < 0.25 else samples, rng)
        found.append(Clip(samples.astype(np.float32)[:WINDOW], [later(word, before / RATE) for word in spoken]))
    return found


def later(word: Spoken, seconds: float) -> Spoken:
    start, end = (None if at is None else at + seconds for at in (word.start, word.end))
    return replace(word, start=start, end=end)


def measure(llm: Any, clips: list[Clip], aligner: Path | None) -> Errors:
    options = {"timestamps": "word", "vad": False, "temperature": 0.0, "use_tqdm": False}
    heard = llm.transcribe([(clip.samples, RATE) for clip in clips], aligner=aligner, **options)
    errors = Errors()
    for clip, one in zip(clips, heard, strict=True):
        found = [word for part in one.segments or () for word in part.words or ()]
        for a, b in same_words([word.word for word in found], [word.word for word in clip.words]):
            own, wanted = found[a], clip.words[b]
            errors.compared += 1
            if wanted.start is not None:
                errors.starts.append(own.start - wanted.start)
            if wanted.end is not None:
                (errors.ends_before_pauses if wanted.paused else errors.ends).append(own.end - wanted.end)
    return errors


def row(system: str, name: str, clips: list[Clip], errors: Errors) -> str:
    cells = [system, name, str(len(clips)), str(sum(len(clip.words) for clip in clips)), str(errors.compared)]
    for values in (errors.starts, errors.ends, errors.ends_before_pauses):
        sizes = np.abs(values)
        missed = " (missed)" if np.median(sizes) > GOAL else ""
        cells += [f"{_ms(np.median(sizes))}{missed}", _ms(np.quantile(sizes, 0.9)), _ms(np.median(values), "+.0f")]
    return f"| {' | '.join(cells)} |"


def _ms(seconds: Any, form: str = ".0f") -> str:
    return f"{1000 * seconds:{form}} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=COUNT, help="clips of each set")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    transformers()
    from sensorium import LLM

    speaker = Speaker(str(ctypes.util.find_library("espeak-ng")))
    head = " | ".join(
        f"{name}, median | 90 % within | late (+) or early (-)" for name in ("starts", "ends", "ends before pauses")
    )
    lines = [f"| times from | speech | clips | words | compared | {head} |", "|---" * 14 + "|"]
    sets = {name: make_clips(name, speaker, args.count) for name in SETS}
    with LLM(ROOT / "assets" / "tiny-asr", device="cpu", dtype="float32") as llm:
        for system, aligner in (("`aligner`", args.model), ("tiny-asr's attention", None)):
            lines += [row(system, name, clips, measure(llm, clips, aligner)) for name, clips in sets.items()]
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([f"{machine()}; tiny-asr in float32", "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
