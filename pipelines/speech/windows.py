"""Splits audio of any length into windows that are cut at silence, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import log10

import torch
from torch import Tensor

from .vad import BLOCK_FRAMES, EnergyDetector, VoiceDetector, frame_size

_THRESHOLD = 0.5  # probability of speech
_PAD = 0.5  # seconds kept around speech
_LONG_SILENCE = 2.0  # seconds of silence that always end a window
_PAUSE, _SHORT_PAUSE = 0.3, 0.09  # minimum seconds of a pause at which a window is cut
_JOINED = 0.5  # seconds; speech with less silence in between is one span
_OVERLAP = 4.0  # seconds that two windows share if there is no pause
_MIN_SPEECH = 0.1  # minimum seconds of speech in a window
_QUIETEST = 1e-4  # peak of sound that may be speech; a smaller one is silence with dither
_QUIET, _VERY_QUIET = 0.01, 0.002  # peaks below which speech may be missed, if none was found, and if some was found


@dataclass(frozen=True)
class Window:
    """Samples `start` to `end` of an audio item.

    Args:
        next_start: sample at which the next window may begin; below `end` if the windows overlap.
        overlap: number of samples shared with the previous window.
        pauses: first and last sample of each pause.
    """

    start: int
    end: int
    samples: Tensor
    next_start: int
    overlap: int = 0
    pauses: tuple[tuple[int, int], ...] = ()

    def pause_times(self, rate: int) -> list[tuple[float, float]]:
        """Return the pauses in seconds since the window's start."""
        return [((first - self.start) / rate, (last - self.start) / rate) for first, last in self.pauses]


class WindowReader:
    """Reads windows from blocks of samples. Holds the samples of one window and one block.

    Args:
        blocks: samples in order, of any lengths.
        rate: hertz.
        size: samples of the longest window.
        detector: finds the speech; everything else is skipped. None: nothing is skipped, and pauses are found by their energy.

    Attributes:
        length: number of samples read so far.
        spans: first and last sample of each stretch of speech in the windows so far.
        peak: largest magnitude of the samples so far.
    """

    def __init__(self, blocks: Iterator[Tensor], rate: int, size: int, detector: VoiceDetector | None) -> None:
        self.rate, self.size, self.length = rate, size, 0
        self.spans: list[tuple[int, int]] = []
        self.peak = 0.0
        self._blocks, self._skips, self._frame = blocks, detector is not None, frame_size(rate)
        self._detector = detector or EnergyDetector(rate)
        self._begin = 0  # position of the buffer's first sample, a multiple of the frame size
        self._buffer = torch.empty(0)
        self._voiced: list[bool] = []  # for each frame of the buffer: True for speech
        self._unclassified: list[Tensor] = []  # samples that the detector has not seen
        self._ended = False

    def quiet_warning(self) -> str | None:
        """Return what to say of sound that is so quiet that speech may have been missed; None otherwise."""
        if not self._skips or not _QUIETEST <= self.peak < (_VERY_QUIET if self.spans else _QUIET):
            return None
        decibels = 20 * log10(self.peak)
        return f"the sound is very quiet (peak {decibels:.0f} dBFS), so that speech may be missed or misheard; amplify it"

    def windows(self) -> Iterator[Window]:
        """Yield windows that are cut at pauses; they overlap where there is none."""
        at = overlap = 0
        while (window := self.read(at, overlap, cut=True)) is not None:
            yield window
            at, overlap = window.next_start, max(0, window.end - window.next_start)

    def read(self, at: int, overlap: int = 0, cut: bool = False) -> Window | None:
        """Return the window that begins at sample `at` or, with a detector, at the next speech; None at the end of the audio.

        `cut`: end the window at a pause, unless the audio ends in it. Samples before `at` are dropped.
        """
        while True:
            start = at if not self._skips or overlap else self._next_speech(at)
            if start is None:
                return None
            self._forget(start)
            self._fill(start + self.size + self.rate)
            if start >= self.length:
                return None
            window = self._window(start, overlap, cut)
            speech = sum(self._flags(window.start, window.end)) * self._frame
            if speech >= _MIN_SPEECH * self.rate if self._skips else window.end - start >= _MIN_SPEECH * self.rate or not start:
                self._add_spans(window)
                return window
            at, overlap = window.next_start, 0

    def _window(self, start: int, overlap: int, cut: bool) -> Window:
        limit = min(start + self.size, self.length)
        pauses = self._pauses(start, limit)
        long = next((p for p in pauses if self._skips and p[1] - p[0] >= _LONG_SILENCE * self.rate), None)
        if long is not None:
            return self._cut(start, long, overlap)
        if limit == self.length and self._ended:
            end = pauses[-1][0] if self._skips and pauses and pauses[-1][1] >= limit else limit
            end = min(limit, end + int(_PAD * self.rate)) if end < limit else limit
            return self._make(start, end, self.length, overlap)
        if cut:
            for least, first in ((_PAUSE, 0.5), (_SHORT_PAUSE, 0.5), (_PAUSE, 0.2)):
                fitting = [p for p in pauses if p[1] - p[0] >= least * self.rate and sum(p) >= 2 * (start + first * self.size)]
                if fitting:
                    return self._cut(start, max(fitting, key=lambda pause: pause[1] - pause[0]), overlap)
        next_start = limit - min(int(_OVERLAP * self.rate), self.size // 4)
        return self._make(start, limit, next_start, overlap)

    def _cut(self, start: int, pause: tuple[int, int], overlap: int) -> Window:
        """Return the window that ends in the given pause: at its middle or, if silence is skipped, at most `_PAD` into it."""
        middle, pad = sum(pause) // 2, int(_PAD * self.rate)
        end = min(middle, pause[0] + pad) if self._skips else middle
        next_start = max(middle, pause[1] - pad) if self._skips else middle
        return self._make(start, end, next_start, overlap)

    def _make(self, start: int, end: int, next_start: int, overlap: int) -> Window:
        samples = self._buffer[start - self._begin : end - self._begin].clone()
        return Window(start, end, samples, next_start, overlap, tuple(self._pauses(start, end, first=True)))

    def _pauses(self, start: int, limit: int, first: bool = False) -> list[tuple[int, int]]:
        """Return start and end of each run of frames without speech in this range. `first`: also of a run at its start."""
        pauses, at = [], start // self._frame * self._frame
        for voiced, run in groupby(self._flags(start, limit)):
            end = at + len(list(run)) * self._frame
            if not voiced and (first or at > start):
                pauses.append((max(at, start), min(end, limit)))
            at = end
        return pauses

    def _next_speech(self, at: int) -> int | None:
        """Return the sample `_PAD` before the next frame with speech, but not before `at`; None if there is no more speech."""
        while True:
            self._forget(at)
            first = (at - self._begin) // self._frame
            first_voiced = next((i for i in range(first, len(self._voiced)) if self._voiced[i]), None)
            if first_voiced is not None:
                return max(at, self._begin + first_voiced * self._frame - int(_PAD * self.rate))
            if self._ended:
                return None
            at = max(at, self.length - int(_PAD * self.rate))
            self._fill(self.length + 1)

    def _add_spans(self, window: Window) -> None:
        at = window.start // self._frame * self._frame
        for voiced, run in groupby(self._flags(window.start, window.end)):
            end = at + len(list(run)) * self._frame
            if voiced:
                first, last = max(at, window.start), min(end, window.end)
                if self.spans and first - self.spans[-1][1] < _JOINED * self.rate:
                    first, last = self.spans.pop()[0], max(last, first)
                self.spans.append((first, last))
            at = end

    def _flags(self, start: int, end: int) -> list[bool]:
        return self._voiced[(start - self._begin) // self._frame : -(-(end - self._begin) // self._frame)]

    def _forget(self, at: int) -> None:
        frames = min((at - self._begin) // self._frame, len(self._voiced))
        if frames > 0:
            self._buffer, self._voiced = self._buffer[frames * self._frame :], self._voiced[frames:]
            self._begin += frames * self._frame

    def _fill(self, end: int) -> None:
        """Read and classify blocks up to the sample `end`, or to the end of the audio."""
        size = BLOCK_FRAMES * self._frame
        while self.length < end and not self._ended:
            waiting = sum(map(len, self._unclassified))
            while waiting < size and (block := next(self._blocks, None)) is not None:
                self._unclassified.append(block)
                waiting += len(block)
            samples = torch.cat(self._unclassified) if self._unclassified else torch.empty(0)
            self._ended = len(samples) < size
            part, rest = samples[:size], samples[size:]
            self._unclassified = [rest] if len(rest) else []
            if len(part):
                self._voiced += (self._detector(part) >= _THRESHOLD).tolist()
                self._buffer = torch.cat([self._buffer, part])
                self.length += len(part)
                self.peak = max(self.peak, float(part.abs().max()))
