"""Speakers that are told apart wrongly: `python -m benchmarks.speakers --speaker-model DIR --model whisper-tiny.en`.

A set of seeded mixtures of 2 to 5 speakers: voices of espeak-ng, and the human voices of --voices (a folder with clips of one
speaker each, whose names begin with the speaker's). Turns last from 0.2 s on, some overlap, every fourth mixture has music.
Mixtures are written to out/speakers, with RTTM and STM. The diarisation error rate comes from pyannote.metrics (no collar,
overlaps count), the concatenated minimum-permutation word error rate from meeteval: pip install pyannote.metrics meeteval.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from .throughput import ROOT

SECTION = "Speakers"
FOLDER = ROOT / "out" / "speakers"
RATE = 16_000
COUNT, SEED = 40, 7
SECONDS = (60, 120)  # of a mixture
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-us-nyc")
VARIANTS = ("m1", "m3", "m5", "m7", "f1", "f2", "f3", "f4", "Andy", "Annie", "Denis", "belinda", "steph", "grandma", "klatt2")
SHORT = ("yes", "no", "right", "okay", "sure", "really", "I see", "go on", "of course", "maybe")
SUBJECTS = ("the committee", "my neighbour", "a young doctor", "the last train", "our oldest customer", "the new library")
VERBS = ("has reached", "will never forget", "wanted to paint", "asked about", "is looking for", "could not find", "bought")
OBJECTS = ("the bridge", "a letter from home", "seven green apples", "the answer", "an old radio", "the road to the river")
ENDS = ("yesterday", "before the winter", "with a friend", "in the morning", "for the second time", "without any help", "")


@dataclass(frozen=True)
class Turn:
    """One turn of a mixture, in seconds. `spans`: start and end of its speech between pauses of 0.3 s and more."""

    start: float
    end: float
    speaker: str
    text: str
    spans: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Mixture:
    name: str
    samples: np.ndarray
    turns: tuple[Turn, ...]

    @property
    def speakers(self) -> int:
        return len({turn.speaker for turn in self.turns})


@dataclass(frozen=True)
class Voice:
    """A speaker: a voice of espeak-ng with speed and pitch, or human clips `(text, samples)`."""

    name: str
    voice: str = ""
    speed: int = 160
    pitch: int = 50
    clips: tuple[tuple[str, np.ndarray], ...] = ()


def mixtures(count: int, seed: int, folder: Path | None) -> Iterator[Mixture]:
    """Yield mixtures; the first of n do not depend on n."""
    human = human_voices(folder) if folder is not None else []
    for number in range(count):
        chance = random.Random(seed * 1000 + number)
        yield mixture(f"mix{number:02}", chance, 2 + number % 4, human if number % 2 else [], number % 4 == 3)


def human_voices(folder: Path) -> list[Voice]:
    """Return the speakers of a folder with manifest.jsonl: names of a speaker's clips of speech begin with the same letters."""
    clips: dict[str, list[tuple[str, np.ndarray]]] = {}
    for line in (folder / "manifest.jsonl").read_text().splitlines():
        entry = json.loads(line)
        name = re.match(r"[a-z]+", entry["file"])
        if entry["kind"] == "speech" and entry["lang"] == "en" and name is not None:
            samples, rate = soundfile.read(folder / entry["file"], dtype="float32")
            clips.setdefault(name[0], []).append((entry["text"], soxr.resample(samples, rate, RATE)))
    return [Voice(name, clips=tuple(own)) for name, own in sorted(clips.items()) if name != "long"]


def mixture(name: str, chance: random.Random, speakers: int, human: Sequence[Voice], music: bool) -> Mixture:
    """Return a conversation. The clips of a human voice are repeated when all were said."""
    variants = chance.sample(VARIANTS, speakers)
    voices = [
        Voice(f"s{i}", f"{chance.choice(ACCENTS)}+{variant}", chance.randint(130, 185), chance.randint(20, 80))
        for i, variant in enumerate(variants)
    ]
    for i, voice in enumerate(human[:speakers]):
        voices[i] = voice
    left = {voice.name: list(voice.clips) for voice in voices}
    length = chance.uniform(*SECONDS)
    samples, turns, at, last = np.zeros(round((length + 30) * RATE), np.float32), list[Turn](), chance.uniform(0.2, 2.0), ""
    while at < length:
        voice = chance.choice([voice for voice in voices if voice.name != last])
        left[voice.name] = left[voice.name] or list(voice.clips)
        text, sound = utterance(chance, voice, left[voice.name])
        sound = sound * np.float32(10 ** (chance.uniform(-26, -18) / 20) / max(float(np.sqrt((sound**2).mean())), 1e-4))
        start = round(at * RATE)
        samples[start : start + len(sound)] += sound[: len(samples) - start]
        end = (start + len(sound)) / RATE
        spans = tuple((start / RATE + first, start / RATE + stop) for first, stop in spoken(sound))
        turns.append(Turn(start / RATE, end, voice.name, text, spans))
        gap = -min(chance.uniform(0.3, 1.2), 0.6 * len(sound) / RATE) if chance.random() < 0.15 else chance.uniform(0.1, 1.2)
        at, last = max(at + 0.1, end + gap), voice.name
    samples = samples[: round((max(turn.end for turn in turns) + 0.5) * RATE)]
    noise = np.random.default_rng(chance.randrange(1 << 30)).normal(0, 10 ** (-60 / 20), len(samples))
    samples += noise.astype(np.float32)
    if music:
        samples += background(chance, len(samples))
    return Mixture(name, (samples / max(1.0, float(np.abs(samples).max()))).astype(np.float32), tuple(turns))


def spoken(sound: np.ndarray) -> list[tuple[float, float]]:
    """Return the stretches, in seconds, between pauses of 0.3 s and more."""
    size, spans = RATE // 50, list[tuple[float, float]]()
    frames = sound[: len(sound) // size * size].reshape(-1, size)
    for number in np.flatnonzero(np.abs(frames).max(1) > 0.06 * float(np.abs(sound).max())).tolist():
        if spans and number / 50 - spans[-1][1] < 0.3:
            spans[-1] = (spans[-1][0], (number + 1) / 50)
        else:
            spans.append((number / 50, (number + 1) / 50))
    return spans


def utterance(chance: random.Random, voice: Voice, left: list[tuple[str, np.ndarray]]) -> tuple[str, np.ndarray]:
    if not voice.voice:
        return left.pop(chance.randrange(len(left)))
    if chance.random() < 0.2:
        text = chance.choice(SHORT)
    else:
        parts = (chance.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDS))
        text = " ".join(filter(None, parts))
        if chance.random() < 0.4:
            text += f", and {utterance_text(chance)}"
    return text, speak(text, voice)


def utterance_text(chance: random.Random) -> str:
    return " ".join(filter(None, (chance.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDS))))


def speak(text: str, voice: Voice) -> np.ndarray:
    """Return the speech at RATE, without the silence around it."""
    command = ["espeak-ng", "-v", voice.voice, "-s", str(voice.speed), "-p", str(voice.pitch), "--stdout", text]
    wav = FOLDER / "voice.wav"
    wav.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    samples, rate = soundfile.read(wav, dtype="float32")
    samples = soxr.resample(samples, rate, RATE)
    loud = np.flatnonzero(np.abs(samples) > 0.005)
    return samples[loud[0] : loud[-1] + 1]


def background(chance: random.Random, count: int) -> np.ndarray:
    """Return music of chords, 26 dB below full scale."""
    music, at = np.zeros(count, np.float32), 0
    while at < count:
        size = min(count - at, round(chance.uniform(0.4, 1.0) * RATE))
        times = np.arange(size) / RATE
        root = 110 * 2 ** (chance.randrange(12) / 12)
        for ratio in (1, 1.25, 1.5, 2):
            music[at : at + size] += np.sin(2 * np.pi * root * ratio * times) * np.exp(-2 * times)
        at += size
    return music * np.float32(0.05 / max(float(np.sqrt((music**2).mean())), 1e-6))


def written(count: int, seed: int, folder: Path | None) -> list[Mixture]:
    """Return the mixtures from out/speakers, where they are made once."""
    place = FOLDER / f"seed{seed}{'' if folder is None else '_voices'}"
    place.mkdir(parents=True, exist_ok=True)
    made = list[Mixture]()
    if not (place / f"mix{count - 1:02}.json").exists():
        for mix in mixtures(count, seed, folder):
            soundfile.write(place / f"{mix.name}.wav", mix.samples, RATE)
            (place / f"{mix.name}.json").write_text(json.dumps([vars(turn) for turn in mix.turns]))
    for number in range(count):
        file = place / f"mix{number:02}.wav"
        turns = tuple(Turn(**turn) for turn in json.loads(file.with_suffix(".json").read_text()))
        made.append(Mixture(file.stem, soundfile.read(file, dtype="float32")[0], turns))
    return made
