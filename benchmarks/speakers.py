"""Measure errors of speakers in transcripts: `python -m benchmarks.speakers --speaker-model DIR --model whisper-tiny.en`.

With --live, the labels of live streams are measured.

A set of seeded mixtures of 2 to 5 speakers: voices of espeak-ng, and the human voices of --voices (a folder with clips of one
speaker each, whose names begin with the speaker's). Turns last from 0.2 s on, some overlap, every fourth mixture has music.
Mixtures are written to out/speakers. The diarisation error rate comes from pyannote.metrics (no collar,
overlaps count), the concatenated minimum-permutation word error rate from meeteval: pip install pyannote.metrics meeteval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from .throughput import ROOT, machine, put

SECTION = "Speakers"
NOTE = (
    "Conversations of espeak-ng's voices and, in every second one, of two human speakers, with overlaps, turns from 0.2 s "
    "on, and music in every fourth. The diarisation error rate (DER) is the share of the speech that is missed, invented, or "
    "given to the wrong speaker; there is no collar, and overlaps count. Pauses of 0.3 s and more are no speech. The number "
    "of speakers is found, or given as `speakers=N`. RTF is the time of both networks and of clustering by the length of the "
    "audio. cpWER counts the words that are wrong or of the wrong speaker, with the number of speakers given; overlapping "
    "words count for both. The networks are those in whisperx 3.8.6 and Resemblyzer 0.1.4; the thresholds were chosen with "
    "another seed, the same human voices and the recording `sample`, which is therefore not "
    "held out. It is the recording in pyannote.audio 4.0.7: 30 s of a telephone call."
)
LIVE_NOTE = (
    "The first mixtures of the table above as live streams. A pass sees only what was heard before it, and final labels stay. "
    "The most speakers are given. The thresholds of live speakers were chosen on mixtures of this set, which are therefore "
    "not held out."
)
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


def annotation(turns: Sequence[Any]) -> Any:
    """Return pyannote's object of turns. Those of a mixture are cut at their pauses."""
    from pyannote.core import Annotation, Segment

    made = Annotation()
    for number, turn in enumerate(turns):
        for part, (start, end) in enumerate(getattr(turn, "spans", [(turn.start, turn.end)])):
            made[Segment(start, end), f"{number}.{part}"] = turn.speaker
    return made


@dataclass(frozen=True)
class Measured:
    """The turns of a mixture that were found, and the seconds of time and of CPU time that this took."""

    mix: Mixture
    turns: Sequence[Any]
    wall: float
    cpu: float


def measure(mix: Mixture, networks: Any, number_is_known: bool) -> Measured:
    import torch
    from sensorium.pipelines.speech.diarization import Diarizer

    wall, cpu = time.perf_counter(), time.process_time()
    diarizer = Diarizer(networks, (mix.speakers, mix.speakers) if number_is_known else (1, 64))
    diarizer.add(torch.from_numpy(mix.samples))
    turns = diarizer.finish()
    return Measured(mix, turns, time.perf_counter() - wall, time.process_time() - cpu)


def row(measured: Sequence[Measured]) -> list[str]:
    """Return cells: error rate and its parts, files with another number of speakers, and the real-time factors."""
    from pyannote.metrics.diarization import DiarizationErrorRate

    metric, wrong = DiarizationErrorRate(), 0
    for one in measured:
        metric(annotation(one.mix.turns), annotation(one.turns))
        wrong += len({turn.speaker for turn in one.turns}) != one.mix.speakers
    seconds, total = sum(len(one.mix.samples) for one in measured) / RATE, metric[:]
    parts = [f"{100 * total[name] / total['total']:.1f}" for name in ("missed detection", "false alarm", "confusion")]
    factors = [f"{sum(values) / seconds:.3f}" for values in zip(*((one.wall, one.cpu) for one in measured), strict=True)]
    return [f"{100 * abs(metric):.1f}", *parts, f"{wrong} of {len(measured)}", *factors]


def measure_words(mixes: Sequence[Mixture], model: Path, folder: Path | None) -> list[str]:
    """Return cells: words, and the percentage that is wrong, with speakers and without."""
    import meeteval
    from sensorium import LLM

    from .spoken_numbers import normaliser

    words, errors, length, plain = normaliser(), 0, 0, 0
    with LLM(model, device="cpu", dtype="float32") as llm:
        for mix in mixes:
            limits = (mix.speakers, mix.speakers)
            (found,) = llm.transcribe((mix.samples, RATE), speakers=limits, speaker_model=folder, language="en", use_tqdm=False)
            if found.error is not None:
                raise RuntimeError(f"{mix.name}: {found.error}")
            said, heard = (by_speaker(turns, words) for turns in (mix.turns, found.segments or ()))
            rate = meeteval.wer.cp_word_error_rate(said, heard)
            errors, length = errors + rate.errors, length + rate.length
            alone = meeteval.wer.siso_word_error_rate(
                *(" ".join(words(" ".join(turn.text for turn in turns))) for turns in (mix.turns, found.segments or ()))
            )
            plain += alone.errors
    return [str(length), f"{100 * errors / length:.1f}", f"{100 * plain / length:.1f}"]


async def measure_live(mixes: Sequence[Mixture], model: Path, folder: Path | None) -> list[str]:
    """Return cells: the error rate of live labels and its parts, files with another number of speakers, words, and cpWER.

    The most speakers are given. Final labels are not changed, so that a speaker may have several.
    """
    import meeteval
    from pyannote.metrics.diarization import DiarizationErrorRate
    from sensorium import AsyncLLM
    from sensorium.pipelines.speech.options import LiveOptions

    from .live import run_in_step
    from .spoken_numbers import normaliser

    words, metric, wrong, errors, length = normaliser(), DiarizationErrorRate(), 0, 0, 0
    async with AsyncLLM(model, device="cpu", dtype="float32") as llm:
        with ThreadPoolExecutor(1) as threads:
            for mix in mixes:
                options = LiveOptions(language="en", rate=RATE, speakers=(1, mix.speakers), speaker_model=folder)
                events = [event for event in await run_in_step(llm, mix.samples, options, threads) if event.kind == "final"]
                turns = [turn for event in events for turn in event.turns or ()]
                metric(annotation(mix.turns), annotation(turns))
                wrong += len({turn.speaker for turn in turns}) != mix.speakers
                segments = [segment for event in events for segment in event.segments or ()]
                rate = meeteval.wer.cp_word_error_rate(by_speaker(mix.turns, words), by_speaker(segments, words))
                errors, length = errors + rate.errors, length + rate.length
    total = metric[:]
    parts = [f"{100 * total[name] / total['total']:.1f}" for name in ("missed detection", "false alarm", "confusion")]
    return [f"{100 * abs(metric):.1f}", *parts, f"{wrong} of {len(mixes)}", str(length), f"{100 * errors / length:.1f}"]


def by_speaker(turns: Sequence[Any], words: Any) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for turn in turns:
        texts.setdefault(turn.speaker or "", []).extend(words(turn.text))
    return {name: " ".join(own) for name, own in texts.items()}


def sample(wav: Path) -> Mixture:
    """Return a recording with an RTTM file of the same name beside it, such as the one in the package pyannote.audio."""
    samples, rate = soundfile.read(wav, dtype="float32")
    turns = []
    for line in wav.with_suffix(".rttm").read_text().splitlines():
        fields = line.split()
        start, end = float(fields[3]), float(fields[3]) + float(fields[4])
        turns.append(Turn(start, end, fields[7], "", ((start, end),)))
    return Mixture(wav.stem, soxr.resample(samples, rate, RATE), tuple(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speaker-model", type=Path, help="folder of the networks; else those in the packages")
    parser.add_argument("--voices", type=Path, help="folder of human clips with manifest.jsonl")
    parser.add_argument("--sample", type=Path, nargs="*", default=[], help="recordings with RTTM files beside them")
    parser.add_argument("--model", type=Path, help="model that transcribes, for the word error rate")
    parser.add_argument("--threads", type=int, default=2, help="threads of the networks")
    parser.add_argument("--count", type=int, default=COUNT, help="number of mixtures")
    parser.add_argument("--words", type=int, default=8, help="number of mixtures that are transcribed")
    parser.add_argument("--live", action="store_true", help="only add the row of live streams; the others stay")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    import torch
    from sensorium.engine.speaker_networks import load_speaker_networks

    torch.set_num_threads(args.threads)
    networks = load_speaker_networks(args.speaker_model)
    mixes = written(args.count, SEED, args.voices)
    if args.live:
        cells = asyncio.run(measure_live(mixes[: args.words], args.model, args.speaker_model))
        head = "| model, mixtures | DER % | missed | false alarm | confusion | wrong number | words | cpWER % |"
        row_text = f"| {args.model.name}, {len(mixes[: args.words])} | {' | '.join(cells)} |"
        lines = [LIVE_NOTE, "", head, "|---" * (head.count("|") - 1) + "|", row_text]
        print("\n".join(lines))
        if args.write:
            put(f"{SECTION} of live streams", "\n".join([*lines, "", machine()]))
        return
    minutes = sum(len(mix.samples) for mix in mixes) / RATE / 60
    groups = {f"{len(mixes)} mixtures, {minutes:.0f} min": mixes}
    groups |= {f"- of {speakers} speakers": [mix for mix in mixes if mix.speakers == speakers] for speakers in range(2, 6)}
    groups |= {mix.name: [mix] for mix in map(sample, args.sample)}
    head = "| files | number of speakers | DER % | missed | false alarm | confusion | wrong number | RTF | RTF, CPU time |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    every = {id(mix): mix for own in groups.values() for mix in own}
    measure(mixes[0], networks, True)  # the first one warms up
    for is_known in (False, True):
        measured = {key: measure(mix, networks, is_known) for key, mix in every.items()}
        for name, own in groups.items():
            cells = row([measured[id(mix)] for mix in own])
            lines.append(f"| {name} | {'given' if is_known else 'found'} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if args.model is not None:
        cells = measure_words(mixes[: args.words], args.model, args.speaker_model)
        head = "| model, mixtures | words | cpWER % | WER % without speakers |"
        lines += ["", head, "|---|---|---|---|", f"| {args.model.name}, {args.words} | {' | '.join(cells)} |"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines += ["", f"{machine()}, networks with {args.threads} of them, peak memory {memory:.1f} GB"]
    text = "\n".join(lines)
    print(text)
    if args.write:
        put(SECTION, f"{NOTE}\n\n{text}")


if __name__ == "__main__":
    main()
