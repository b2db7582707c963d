"""Synthetic speech for tiny-asr: espeak-ng voices with reverberation, noise and gain.

A seed always gives the same clip with the same version of espeak-ng.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from dataclasses import dataclass

import numpy as np
import soxr

from .grammar import Rng, pick, utterance

RATE, SECONDS = 16_000, 8
WINDOW = RATE * SECONDS
ACCENTS = ("en-us", "en", "en-gb-x-rp")
VARIANTS = ("f1", "f2", "f3", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8", "Alex", "Andy", "Annie", "Denis")
UNSEEN_VARIANT = "f4"  # never trained on
SPEEDS = (115, 215)  # words per minute
FAST = (225, 245)  # never trained on


@dataclass(frozen=True)
class Voice:
    """A voice of espeak-ng. `speed`: words per minute. `pitch`: 0 to 99."""

    name: str
    speed: int
    pitch: int


@dataclass(frozen=True)
class Clip:
    """float32 samples at RATE, and `(start, end, text)` in seconds of each utterance."""

    samples: np.ndarray
    parts: tuple[tuple[float, float, str], ...]

    @property
    def text(self) -> str:
        return " ".join(text for _, _, text in self.parts)


class Espeak:
    """Calls libespeak-ng in this process, because starting the program for each text takes ten times as long."""

    def __init__(self, library: str) -> None:
        self.library, self.blocks = ctypes.CDLL(library), list[bytes]()
        # 2: samples go to the callback, in this thread; 1: so do the phonemes, as events
        self.rate = int(self.library.espeak_Initialize(2, 0, None, 1))
        if self.rate <= 0:
            raise OSError(f"{library} does not start; reinstall espeak-ng with its voices")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self.callback = kind(self._receive)

    def _receive(self, samples: int | None, count: int, events: int | None) -> int:
        if samples:
            self.blocks.append(ctypes.string_at(samples, 2 * count))
        return 0

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """Return the samples at `rate`."""
        self.blocks = []
        self.library.espeak_SetSynthCallback(self.callback)  # the library has one, which may be that of another object
        if self.library.espeak_SetVoiceByName(voice.name.encode()):
            raise ValueError(f"espeak-ng has no voice {voice.name}; install espeak-ng-data")
        for parameter, value in ((1, voice.speed), (3, voice.pitch)):
            self.library.espeak_SetParameter(parameter, value, 0)
        data = text.encode() + b"\0"
        self.library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, 1, None, None)
        self.library.espeak_Synchronize()
        return np.frombuffer(b"".join(self.blocks), np.int16).astype(np.float32) / 32768


@functools.cache
def espeak() -> Espeak | None:
    """Return the speech synthesiser; None if it is not installed (`apt-get install espeak-ng`)."""
    library = ctypes.util.find_library("espeak-ng")
    return None if library is None else Espeak(library)


def random_voice(rng: Rng, variants: tuple[str, ...] = VARIANTS, speeds: tuple[int, int] = SPEEDS) -> Voice:
    speed, pitch = int(rng.integers(speeds[0], speeds[1] + 1)), int(rng.integers(20, 80))
    return Voice(f"{pick(rng, ACCENTS)}+{pick(rng, variants)}", speed, pitch)


def speak(text: str, voice: Voice) -> np.ndarray:
    """Return the speech at RATE, without the silence around it."""
    engine = espeak()
    assert engine is not None
    samples = soxr.resample(engine.speak(text, voice), engine.rate, RATE)
    loud = np.flatnonzero(np.abs(samples) > 0.005)
    return samples[loud[0] : loud[-1] + 1]


def coloured_noise(rng: Rng, count: int) -> np.ndarray:
    """Return noise of unit power: white to brown, or the hum of the mains."""
    if rng.random() < 0.15:
        t, base = np.arange(count) / RATE, float(rng.choice([50, 60, 100, 120])) * rng.uniform(0.98, 1.02)
        noise = sum(rng.random() * np.sin(2 * np.pi * base * k * t + rng.uniform(0, 6.28)) for k in range(1, 6))
    else:
        spectrum = np.fft.rfft(rng.standard_normal(count))
        frequency = np.maximum(np.fft.rfftfreq(count, 1 / RATE), 40)
        noise = np.fft.irfft(spectrum * frequency ** -rng.uniform(0, 1), count)
    return np.asarray(noise / (np.std(noise) + 1e-9))


def reverberate(samples: np.ndarray, rng: Rng) -> np.ndarray:
    """Convolve with a room impulse response that decays exponentially in 0.1 to 0.3 s."""
    seconds = rng.uniform(0.1, 0.3)
    count = int(RATE * seconds)
    room = rng.standard_normal(count) * np.exp(-6.9 * np.arange(count) / count)
    room *= rng.uniform(0.1, 0.4) / np.sqrt(np.sum(room**2))
    room[0] = 1
    size = 1 << (len(samples) + count).bit_length()
    return np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(room, size), size)[: len(samples) + count // 3]


def degrade(samples: np.ndarray, rng: Rng) -> np.ndarray:
    """Limit the bandwidth of some clips, and add noise 10 to 40 dB below the speech and a gain."""
    power = float(np.sqrt(np.mean(samples[np.abs(samples) > 1e-4] ** 2))) if np.any(np.abs(samples) > 1e-4) else 0.05
    if rng.random() < 0.15:
        spectrum, frequency = np.fft.rfft(samples), np.fft.rfftfreq(len(samples), 1 / RATE)
        spectrum[(frequency < rng.uniform(50, 300)) | (frequency > rng.uniform(3300, 7000))] *= 0.02
        samples = np.fft.irfft(spectrum, len(samples))
    if rng.random() < 0.7:
        samples = samples + coloured_noise(rng, len(samples)) * power * 10 ** (-rng.uniform(10, 40) / 20)
    peak = float(np.abs(samples).max()) + 1e-9
    return np.asarray(samples * min(0.99 / peak, 10 ** (rng.uniform(-20, 3) / 20)), np.float32)


def silence(rng: Rng) -> Clip:
    """Make a clip without speech: silence, noise, a hum or clicks."""
    count = int(rng.integers(RATE // 2, WINDOW))
    samples = coloured_noise(rng, count) * 10 ** (rng.uniform(-80, -10) / 20) if rng.random() < 0.85 else np.zeros(count)
    if rng.random() < 0.2:
        samples[rng.integers(0, count, int(rng.integers(1, 20)))] += rng.uniform(0.1, 0.8)
    return Clip(np.asarray(np.clip(samples, -1, 1), np.float32), ())


def clip(rng: Rng, kind: str, voice: Voice | None = None, second: str | None = None, clean: bool = False) -> Clip:
    """Speak one utterance of `kind`, or two, in one voice. `clean`: no room, noise or gain.

    Clips that are too long for the window are drawn again.
    """
    while True:
        lead = rng.uniform(0.02, 0.6) if rng.random() < 0.85 else rng.uniform(0.6, 3)
        who, parts, spoken = voice or random_voice(rng), [], [np.zeros(int(RATE * lead))]
        for one in (kind,) if second is None else (kind, second):
            text = utterance(rng, one)
            start = sum(map(len, spoken)) / RATE
            spoken.append(speak(text, who))
            parts.append((start, start + len(spoken[-1]) / RATE, text))
            spoken.append(np.zeros(int(RATE * rng.uniform(0.05 if second is None else 0.35, 0.9))))
        samples = np.concatenate(spoken)
        if len(samples) > WINDOW - RATE // 10:
            continue
        if not clean:
            samples = reverberate(samples, rng) if rng.random() < 0.25 else samples
            samples = degrade(samples, rng)
        return Clip(np.asarray(samples[:WINDOW], np.float32), tuple(parts))
