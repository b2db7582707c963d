"""Windows of an audio of any length, read in constant memory and cut at silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .vad import BLOCK_FRAMES, EnergyDetector, VoiceDetector, frame_size

_THRESHOLD = 0.5  # probability of speech
_PAD = 0.2  # seconds kept around speech
_LONG_SILENCE = 2.0  # seconds; a window does not go on behind it
_PAUSE, _SHORT_PAUSE = 0.3, 0.09  # seconds of silence at which a window is cut
_JOINED = 0.5  # seconds of silence inside a span of speech
_OVERLAP = 4.0  # seconds that two windows share if there is no pause
_LEAST = 0.1  # seconds of speech of a window


@dataclass(frozen=True)
class Window:
    """Samples `start` to `end` of an audio.

    Args:
        following: sample at which the next window begins, or later if there is silence; below `end` if the windows overlap.
        overlap: samples at its start that the previous window ends with.
        speech_end: the sample behind its last speech.
    """

    start: int
    end: int
    samples: Tensor
    following: int
    overlap: int = 0
    speech_end: int = 0


class WindowReader:
    """Reads windows from blocks of samples. It holds the samples of one window and one block.

    Args:
        blocks: samples in order, of any lengths.
        rate: hertz.
        size: samples of the longest window.
        detector: finds speech, and windows hold only speech; None reads all samples, and finds pauses by their energy.

    Attributes:
        length: samples of the audio; known when no window is left.
        spans: first and last sample of each stretch of speech up to the last window.
    """

    def __init__(self, blocks: Iterator[Tensor], rate: int, size: int, detector: VoiceDetector | None) -> None:
        self.rate, self.size, self.length = rate, size, 0
        self.spans: list[tuple[int, int]] = []
        self._blocks, self._skips, self._frame = blocks, detector is not None, frame_size(rate)
        self._detector = detector or EnergyDetector(self._frame)
        self._begin = 0  # the first sample of the buffer; a multiple of the frame
        self._buffer = torch.empty(0)
        self._voiced: list[bool] = []  # of each frame of the buffer
        self._rest: list[Tensor] = []  # samples without flags
        self._ended = False

    def windows(self) -> Iterator[Window]:
        """Yield windows that are cut at pauses; they overlap where there is none."""
        at = overlap = 0
        while (window := self.read(at, overlap, cut=True)) is not None:
            yield window
            at, overlap = window.following, max(0, window.end - window.following)

    def read(self, at: int, overlap: int = 0, cut: bool = False) -> Window | None:
        """Return the window at a sample or, with a detector, at the speech behind it; None at the end.

        `cut`: end it at a pause if the audio goes on behind it. Samples before `at` are forgotten.
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
            if speech >= _LEAST * self.rate if self._skips else window.end - start >= _LEAST * self.rate or not start:
                self._add_spans(window)
                return window
            at, overlap = window.following, 0

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
                found = [p for p in pauses if p[1] - p[0] >= least * self.rate and sum(p) >= 2 * (start + first * self.size)]
                if found:
                    return self._cut(start, max(found, key=lambda pause: pause[1] - pause[0]), overlap)
        following = limit - min(int(_OVERLAP * self.rate), self.size // 4)
        return self._make(start, limit, following, overlap)

    def _cut(self, start: int, pause: tuple[int, int], overlap: int) -> Window:
        """Return the window that ends in a pause, with at most `_PAD` of it if silence is skipped."""
        middle, pad = sum(pause) // 2, int(_PAD * self.rate)
        end = min(middle, pause[0] + pad) if self._skips else middle
        following = max(middle, pause[1] - pad) if self._skips else middle
        return self._make(start, end, following, overlap)

    def _make(self, start: int, end: int, following: int, overlap: int) -> Window:
        pauses = self._pauses(start, end)
        speech_end = pauses[-1][0] if pauses and pauses[-1][1] >= end else end
        return Window(start, end, self._buffer[start - self._begin : end - self._begin].clone(), following, overlap, speech_end)

    def _pauses(self, start: int, limit: int) -> list[tuple[int, int]]:
        """Return first and last sample of each run of frames without speech in this range, but not one at its start."""
        pauses, at = [], start // self._frame * self._frame
        for voiced, run in groupby(self._flags(start, limit)):
            end = at + len(list(run)) * self._frame
            if not voiced and at > start:
                pauses.append((at, min(end, limit)))
            at = end
        return pauses

    def _next_speech(self, at: int) -> int | None:
        """Return where to begin before the first frame with speech that ends behind `at`, and read on until there is one."""
        while True:
            self._forget(at)
            first = (at - self._begin) // self._frame
            found = next((i for i in range(first, len(self._voiced)) if self._voiced[i]), None)
            if found is not None:
                return max(at, self._begin + found * self._frame - int(_PAD * self.rate))
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
        """Read blocks until there are flags up to the sample `end`, or until the audio ends."""
        size = BLOCK_FRAMES * self._frame
        while self.length < end and not self._ended:
            waiting = sum(map(len, self._rest))
            while waiting < size and (block := next(self._blocks, None)) is not None:
                self._rest.append(block)
                waiting += len(block)
            samples = torch.cat(self._rest) if self._rest else torch.empty(0)
            self._ended = len(samples) < size
            part, rest = samples[:size], samples[size:]
            self._rest = [rest] if len(rest) else []
            if len(part):
                self._voiced += (self._detector(part) >= _THRESHOLD).tolist()
                self._buffer = torch.cat([self._buffer, part])
                self.length += len(part)
