"""Tones are no speech: of telephones, fax machines, alarms and devices. Speech stays speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from sensorium import LLM
from sensorium.pipelines.speech.vad import BLOCK_FRAMES, EnergyDetector, StreamDetector, _probability, _smooth, frame_size

RATE, SECONDS = 16_000, 21
ROOT = Path(__file__).parents[2]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "speech"
CLIPS = sorted((ROOT / "assets" / "speech").glob("*.flac")) + [
    file for file in sorted(SHARED.glob("*.flac")) if file.name not in ("noise_10s.flac", "silence_10s.flac")
]
RNG = np.random.default_rng(0)


def times(seconds: float) -> np.ndarray:
    return np.arange(round(seconds * RATE)) / RATE


def tone(seconds: float, *hertz: float) -> np.ndarray:
    return sum(np.sin(2 * np.pi * f * times(seconds) + i) for i, f in enumerate(hertz)) * 0.3 / len(hertz)


def square(seconds: float, hertz: float) -> np.ndarray:
    return 0.3 * np.sign(tone(seconds, hertz))


def sweep(seconds: float, first: float, last: float) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * np.cumsum(np.linspace(first, last, round(seconds * RATE))) / RATE)


def pause(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE))


def dial(keys: Sequence[tuple[int, int]], on: float, off: float) -> list[np.ndarray]:
    return [part for key in keys for part in (tone(on, *key), pause(off))]


def bell(seconds: float) -> np.ndarray:
    strokes = 0.3 + 0.7 * np.exp(-2 * (times(seconds) * 20 % 1))
    return tone(seconds, 1050, 1410, 2230, 3120) * strokes


KEYS = [(941, 1336), (697, 1209), (770, 1477), (852, 1209), (852, 1477), (941, 1477)]
PARTS: dict[str, list[np.ndarray]] = {
    "ring, 1 s in 4": [tone(1, 425), pause(3)],
    "ring, 1 s in 5": [tone(1, 425), pause(4)],
    "ring, two tones": [tone(2, 440, 480), pause(4)],
    "ring, twice": [tone(0.4, 400, 450), pause(0.2), tone(0.4, 400, 450), pause(2)],
    "busy": [tone(0.5, 425), pause(0.5)],
    "busy, two tones": [tone(0.5, 480, 620), pause(0.5)],
    "congestion": [tone(0.25, 480, 620), pause(0.25)],
    "dial tone": [tone(5, 350, 440), pause(3)],
    "DTMF": [*dial(KEYS, 0.1, 0.1), pause(2)],
    "DTMF, slow": [*dial(KEYS, 0.2, 0.3), pause(1)],
    "beep": [tone(0.2, 1000), pause(2)],
    "time signal": [tone(0.1, 1000), pause(0.9)],
    "fax, calling": [tone(0.5, 1100), pause(3)],
    "fax, answering": [pause(2), tone(3, 2100), pause(4)],
    "special information": [tone(0.274, 914), tone(0.274, 1428), tone(0.38, 1777), pause(2)],
    "smoke alarm": [square(0.5, 3100), pause(0.5)] * 3 + [pause(1)],
    "alarm clock": [square(0.1, 2000), pause(0.1)] * 4 + [pause(0.6)],
    "siren": [sweep(1, 500, 1500), sweep(1, 1500, 500), pause(2)],
    "two-tone siren": [tone(0.5, 440), tone(0.5, 585)] * 3 + [pause(2)],
    "buzzer": [square(0.7, 240), pause(1)],
    "bell": [bell(1.5), pause(2)],
    "truck": [tone(0.5, 1250), pause(0.5)],
    "alert": [tone(4, 853, 960), pause(3)],
}
CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "clean": lambda sound: sound,
    "quiet": lambda sound: sound * 0.03,
    "some noise": lambda sound: sound + RNG.normal(0, 0.002, len(sound)),
    "clipped": lambda sound: np.clip(4 * sound, -1, 1),
}


def sound_of(name: str) -> np.ndarray:
    part = np.concatenate(PARTS[name])
    return np.tile(part, -(-SECONDS * RATE // len(part)))[: SECONDS * RATE]


def blocks(detector: Callable[[torch.Tensor], torch.Tensor], sound: np.ndarray, first: int, size: int) -> torch.Tensor:
    samples = torch.tensor(sound, dtype=torch.float32)
    parts = [samples[: first * frame_size(RATE)], *samples[first * frame_size(RATE) :].split(size * frame_size(RATE))]
    return torch.cat([detector(part) for part in parts if len(part)]) >= 0.5


def lost(audible: torch.Tensor, speech: torch.Tensor) -> int:
    """Return the number of audible frames that are more than 0.5 s from a frame of speech."""
    near = torch.nn.functional.max_pool1d(speech[None].float(), 31, 1, 15)[0] > 0
    return int((audible & ~near).sum())


class Energy(EnergyDetector):
    """Everything audible."""

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        decibels = _smooth(self.levels(samples))
        known = torch.cat([self._previous, decibels], 1) if decibels.shape[1] < BLOCK_FRAMES // 2 else decibels
        self._previous = decibels
        return _probability(decibels, known)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PARTS)
def test_tones_are_no_speech(name: str, change: str) -> None:
    sound = CHANGES[change](sound_of(name))
    speech = blocks(EnergyDetector(RATE), sound, BLOCK_FRAMES, BLOCK_FRAMES)
    assert speech.sum() <= 3, "0.1 s are transcribed"


@pytest.mark.parametrize("name", PARTS)
def test_tones_in_a_stream_are_no_speech(name: str) -> None:
    assert blocks(StreamDetector(True, RATE), sound_of(name), 47, 8).sum() <= 3


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("file", CLIPS, ids=lambda file: file.stem)
def test_speech_stays_speech(file: Path, change: str) -> None:
    """Every audible frame is at most 0.5 s, the audio kept around speech, from a frame of speech."""
    sound = CHANGES[change](soundfile.read(file)[0])
    audible = blocks(Energy(RATE), sound, BLOCK_FRAMES, BLOCK_FRAMES)
    assert lost(audible, blocks(EnergyDetector(RATE), sound, BLOCK_FRAMES, BLOCK_FRAMES)) == 0
    streamed, detector = torch.empty(0, dtype=torch.bool), StreamDetector(True, RATE)
    for part in torch.tensor(sound, dtype=torch.float32).split(8 * frame_size(RATE)):
        flags = detector(part) >= 0.5
        streamed[len(streamed) - detector.reclassified_frames :] |= True  # as in LiveWindows
        streamed = torch.cat([streamed, flags])
    assert lost(audible, streamed) <= 3


@pytest.mark.parametrize("name", ["ring, 1 s in 4", "busy", "DTMF", "dial tone"])
def test_speech_after_and_before_tones_is_speech(name: str) -> None:
    said = soundfile.read(ROOT / "assets" / "speech" / "date.flac")[0]
    sound = np.concatenate([sound_of(name)[: 8 * RATE], said, sound_of(name)[: 8 * RATE]])
    alone = blocks(EnergyDetector(RATE), np.concatenate([pause(8), said, pause(8)]), BLOCK_FRAMES, BLOCK_FRAMES)
    speech = blocks(EnergyDetector(RATE), sound, BLOCK_FRAMES, BLOCK_FRAMES)
    assert lost(alone, speech) == 0


@pytest.mark.parametrize("louder", [0, 6, 10])
@pytest.mark.parametrize("hertz", [(425,), (1000,), (2600,), (350, 440), (50, 100, 150, 250)], ids=str)
def test_speech_under_a_steady_tone_is_speech(hertz: tuple[int, ...], louder: int) -> None:
    """The tone begins 2 s before the speech and is `louder` by some decibels."""
    said = np.concatenate([soundfile.read(ROOT / "assets" / "speech" / f"{name}.flac")[0] for name in ("date", "alarm")])
    sound, below = np.concatenate([pause(2), said, pause(1)]), tone(3 + len(said) / RATE, *hertz)[: 3 * RATE + len(said)]
    below *= np.sqrt((said**2).mean() / (below**2).mean()) * 10 ** (louder / 20)
    alone = blocks(EnergyDetector(RATE), sound, BLOCK_FRAMES, BLOCK_FRAMES)
    assert lost(alone, blocks(EnergyDetector(RATE), sound + below, BLOCK_FRAMES, BLOCK_FRAMES)) == 0
    assert blocks(EnergyDetector(RATE), below, BLOCK_FRAMES, BLOCK_FRAMES).sum() <= 3


def test_very_quiet_speech_gives_a_warning() -> None:
    said, noise = soundfile.read(ROOT / "assets" / "speech" / "date.flac", dtype="float32")[0], np.random.default_rng(0)
    peaks = (0.02, 1.4e-3, 1e-3, 2e-4)
    dither = noise.integers(-1, 2, 3 * RATE).astype(np.float32) / 32768
    with LLM(ROOT / "assets" / "tiny-asr", device="cpu") as llm:
        files = [(sound, RATE) for sound in (*(said * np.float32(peak / np.abs(said).max()) for peak in peaks), dither)]
        *spoken, silent = llm.transcribe(files, use_tqdm=False)
    assert spoken[0].text == "Today is Monday the twenty third of November."
    assert spoken[0].warnings == silent.warnings == ()
    for peak, one in zip(peaks[1:], spoken[1:], strict=True):
        assert f"very quiet (peak {20 * np.log10(peak):.0f} dBFS)" in one.warnings[0]
    assert (silent.text, silent.skipped) == ("", "silence")


def test_ring_tones_give_no_text() -> None:
    sound = sound_of("ring, 1 s in 4").astype(np.float32)
    with LLM(ROOT / "assets" / "tiny-asr", device="cpu") as llm:
        (found,) = llm.transcribe((sound, RATE), use_tqdm=False)
        assert (found.text, found.skipped, found.windows) == ("", "silence", ())
        with llm.live_audio(RATE) as session:
            session.push(sound)
            session.finish()
            assert [event.kind for event in session.events()] == ["ended"]
