"""Finds who speaks when: the turns of speakers in audio of any length, in nearly constant memory.

The segmentation network tells up to three speakers apart in each window of some seconds. The speech of each of them becomes a
vector, and vectors of all windows are grouped by speaker. Sources: arXiv 2105.13802 (clustering of local speakers),
arXiv 2104.04045 (activities of overlapping windows are averaged).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...engine.speaker_networks import HOP, RATE, PyanNet, SpeakerNetworks
from .clustering import Array, assign, cluster
from .segments import MIN_OFF, SpeakerTurn

_STEP = 0.2  # of a window, after which the next one begins
_BATCH = 16  # windows that the networks read at a time
_ACTIVE = 0.5  # probability of a speaker who speaks
_MIN_ALONE, _MIN_SPEECH = 0.4, 0.25  # seconds that a speaker speaks alone, or at all, in a window if the speech has a voice
_MIN_REFERENCE = 0.5  # seconds of speech in a reference clip
SURE = 1.5  # seconds of speech of a vector that takes part in clustering
SAME = 0.82  # cosine of two clusters that are one speaker
SAME_NAME = 0.7  # cosine of a cluster and the voice of a known speaker
_NOISE = 0.03  # share of all speech that a speaker has at least
_MIN_ON = 0.1  # seconds: shorter turns are left out


@dataclass(frozen=True, eq=False)
class Voice:
    """The speech of one speaker in a window.

    Args:
        vector: float16; None if there is too little speech.
        seconds: of speech without others, of which the vector is; 0 if others speak, too.
    """

    window: int
    speaker: int
    vector: np.ndarray | None
    seconds: float


class VoiceReader:
    """Reads windows of samples: who is active in each frame, and a vector of each voice.

    A second of audio leaves 1 to 3 KB in memory.

    Attributes:
        length: samples that were added.
        active: of each window, uint8 `[frames, speakers]`, probabilities in 255ths.
        voices: of all windows, in their order.
    """

    def __init__(self, networks: SpeakerNetworks) -> None:
        self.networks = networks
        net = networks.segmentation
        self._size = round(net.seconds * RATE)
        self.frames = net.num_frames(self._size)
        self.step = max(1, round(_STEP * self._size / net.frame_step))  # frames
        self._step_samples = self.step * net.frame_step
        self._frame_seconds = net.frame_step / RATE
        self._buffer, self.length = torch.empty(0), 0
        self.active, self.voices = list[np.ndarray](), list[Voice]()

    def add(self, samples: Tensor, batch: int = _BATCH) -> None:
        """Add the next samples, float32 `[n]` at 16 kHz. `batch`: windows that the networks read at a time."""
        self.length += len(samples)
        self._buffer = torch.cat([self._buffer, samples])
        size = self._size + (batch - 1) * self._step_samples
        while len(self._buffer) >= size:
            self._read(self._buffer[:size].unfold(0, self._size, self._step_samples))
            self._buffer = self._buffer[batch * self._step_samples :].clone()

    def finish(self) -> None:
        """Read the rest of the samples, in windows that end with silence."""
        if len(self._buffer) > (self._size - self._step_samples if self.active else 0):
            count = max(1, -(-(len(self._buffer) - self._size) // self._step_samples) + 1)
            size = self._size + (count - 1) * self._step_samples
            self._read(F.pad(self._buffer, (0, size - len(self._buffer))).unfold(0, self._size, self._step_samples))
        self._buffer = torch.empty(0)

    def _read(self, windows: Tensor) -> None:
        """Add windows, `[n, samples]`."""
        activity = self.networks.segmentation.activity(windows)
        first, voices, speech = len(self.active), list[Voice](), list[Tensor]()
        for number, (samples, active) in enumerate(zip(windows, (activity > _ACTIVE).numpy(), strict=True), first):
            if not active.any():
                continue
            mel = self.networks.embedding.features(samples)
            near = nearest_frames(self.networks.segmentation, len(mel), self.frames)
            for speaker, own in enumerate(active.T):
                alone = own & (active.sum(1) == 1)
                is_alone = self._frame_seconds * alone.sum() >= _MIN_ALONE
                chosen = alone if is_alone else own
                seconds = self._frame_seconds * float(chosen.sum())
                if not own.any():
                    continue
                voices.append(Voice(number, speaker, None, seconds if is_alone else 0.0))
                if seconds >= _MIN_SPEECH:
                    speech.append(mel[torch.from_numpy(chosen[near])])
                    voices[-1] = replace(voices[-1], vector=np.empty(0))
        vectors = iter(self.networks.embedding.embed(speech).numpy()) if speech else iter(())
        self.voices += [
            voice if voice.vector is None else replace(voice, vector=next(vectors).astype(np.float16)) for voice in voices
        ]
        self.active += list((activity * 255).round().to(torch.uint8).numpy())

    def similarities(self, centres: Array) -> list[Array]:
        """Return the cosines of each window's speakers and `centres`, `[clusters, dim]`; NaN for one without a vector."""
        tables: list[Array] = [np.full((active.shape[1], len(centres)), np.nan, np.float32) for active in self.active]
        for voice in self.voices:
            if voice.vector is not None:
                tables[voice.window][voice.speaker] = centres @ voice.vector
        return tables

    def turns(self, speakers: Sequence[Sequence[int]], count: int) -> Iterator[tuple[float, float, int]]:
        """Yield start and end, in seconds, and the number of each turn's speaker.

        Activities of overlapping windows are averaged.

        Args:
            speakers: of each window, the numbers of its speakers; -1 for one who does not speak.
            count: of all speakers.
        """
        runs = [_Runs(MIN_OFF / self._frame_seconds, _MIN_ON / self._frame_seconds) for _ in range(count)]
        sums, heard = np.zeros((self.frames, count), np.float32), np.zeros(self.frames, np.float32)
        voiced = np.zeros(self.frames, np.float32)  # speakers at a time
        last = len(self.active) - 1
        for number, (active, numbers) in enumerate(zip(self.active, speakers, strict=True)):
            values = active.astype(np.float32) / 255
            for speaker, cluster_number in enumerate(numbers):
                if cluster_number >= 0:
                    sums[:, cluster_number] += values[:, speaker]
            voiced += (values > _ACTIVE).sum(1)
            heard += 1
            done = self.frames if number == last else self.step
            level = sums[:done] / heard[:done, None]
            rank = (-level).argsort(1).argsort(1)
            most = np.rint(voiced[:done] / heard[:done])[:, None]
            for own, run in zip(((rank < most) & (level > 0)).T, runs, strict=True):
                run.add(own)
            for totals in (sums, heard, voiced):
                totals[:-done] = totals[done:].copy()
                totals[-done:] = 0
        start = self.networks.segmentation.first_frame / RATE - self._frame_seconds / 2
        for number, run in enumerate(runs):
            for first, end in run.finish():
                times = (max(0.0, start + frame * self._frame_seconds) for frame in (first, end))
                begin, stop = (round(min(time, self.length / RATE), 3) for time in times)
                if begin < stop:
                    yield begin, stop, number


class Diarizer:
    """Finds the turns of the speakers of one audio item.

    Args:
        limits: fewest and most speakers.
        known: names of speakers, and the vector of each one's voice.
    """

    def __init__(self, networks: SpeakerNetworks, limits: tuple[int, int], known: Sequence[tuple[str, Array]] = ()) -> None:
        self.reader, self._limits, self._known = VoiceReader(networks), limits, known

    def add(self, samples: Tensor) -> None:
        """Add the next samples, float32 `[n]` at 16 kHz."""
        self.reader.add(samples)

    def finish(self) -> tuple[SpeakerTurn, ...]:
        """Return the turns of all speakers, in the order of their starts.

        Speakers whose voice is not known are SPEAKER_00, SPEAKER_01, ... in the order of their first turns.
        """
        self.reader.finish()
        centres = self._cluster()
        if centres is None:
            return ()
        turns = self.reader.turns(assign(self.reader.similarities(centres)), len(centres))
        return _named((SpeakerTurn(start, end, str(number)) for start, end, number in turns), self._names(centres))

    def _cluster(self) -> Array | None:
        """Return the voices of the speakers, `[speakers, dim]`; None if nobody speaks."""
        voices = [voice for voice in self.reader.voices if voice.vector is not None]
        if not voices:
            return None
        sure = [voice for voice in voices if voice.seconds >= SURE]
        fewest, most = self._limits
        chosen = sure if len(sure) >= fewest and sure else voices
        return cluster_voices(chosen, (min(fewest, len(chosen)), most), _NOISE)

    def _names(self, centres: Array) -> dict[str, str]:
        """Return the names of known speakers by the numbers of their clusters."""
        if not self._known:
            return {}
        table = centres @ np.stack([voice for _, voice in self._known]).T
        (numbers,) = assign([np.where(table >= SAME_NAME, table, np.nan)])
        return {str(cluster): self._known[number][0] for cluster, number in enumerate(numbers) if number >= 0}


def cluster_voices(voices: Sequence[Voice], limits: tuple[int, int], noise: float) -> Array:
    """Return the mean vectors of the speakers of voices that have a vector; see `clustering.cluster`."""
    vectors = np.stack([voice.vector for voice in voices if voice.vector is not None]).astype(np.float32)
    weights = np.array([max(voice.seconds, _MIN_SPEECH) for voice in voices], dtype=np.float32)
    windows = np.array([voice.window for voice in voices])
    return cluster(vectors, weights, windows, SAME, limits, noise)


class _Runs:
    """Runs of frames in which a speaker speaks. Gaps up to `gap` frames are closed, runs below `least` are left out."""

    def __init__(self, gap: float, least: float) -> None:
        self._gap, self._least, self._at = gap, least, 0
        self._runs = list[tuple[int, int]]()

    def add(self, active: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(active.astype(np.int8), prepend=0, append=0)) + self._at
        for first, end in edges.reshape(-1, 2).tolist():
            if self._runs and first - self._runs[-1][1] <= self._gap:
                first = self._runs.pop()[0]
            self._runs.append((first, end))
        self._at += len(active)

    def finish(self) -> list[tuple[int, int]]:
        return [(first, end) for first, end in self._runs if end - first >= self._least]


def _named(turns: Iterator[SpeakerTurn], names: Mapping[str, str]) -> tuple[SpeakerTurn, ...]:
    ordered = sorted(turns, key=lambda turn: (turn.start, turn.end))
    unnamed = dict.fromkeys(turn.speaker for turn in ordered if turn.speaker not in names)
    labels = {**names, **{name: f"SPEAKER_{number:02}" for number, name in enumerate(unnamed)}}
    return tuple(replace(turn, speaker=labels[turn.speaker]) for turn in ordered)


def voice_of(networks: SpeakerNetworks, samples: Tensor) -> Array | None:
    """Return the vector of the voice in float32 `[n]` at 16 kHz; None if there is too little speech.

    If several speak, it is that of the one who speaks most in the first windows.
    """
    net = networks.segmentation
    size = round(net.seconds * RATE)
    speech = list[Tensor]()
    for part in samples[: 6 * size].split(size):
        (active,) = net.activity(F.pad(part, (0, size - len(part)))[None]) > _ACTIVE
        mel = networks.embedding.features(F.pad(part, (0, size - len(part))))
        own = active[:, int(active.sum(0).argmax())]
        speech.append(mel[own[torch.from_numpy(nearest_frames(net, len(mel), len(own)))]])
    frames = torch.cat(speech) if speech else torch.empty(0, 1)
    if len(frames) * HOP < _MIN_REFERENCE * RATE:
        return None
    vector: Array = networks.embedding.embed([frames])[0].numpy()
    return vector


def nearest_frames(net: PyanNet, count: int, frames: int) -> np.ndarray:
    """Return the frame of the segmentation network that is nearest to each of `count` frames of mel energies."""
    near = np.rint((np.arange(count) * HOP - net.first_frame) / net.frame_step).astype(np.int64)
    return near.clip(0, frames - 1)
