"""Windows of a live stream: finds speech while samples arrive, and chooses where the open window is cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tones import PROTECTED_FRAMES
from .vad import StreamDetector, frame_size

_PAD = 0.5  # seconds kept around speech, at most an eighth of a window
_MIN_SPEECH = 0.1  # minimum seconds of speech in a window
_FIRST_FRAMES, _FRAMES = 47, 8  # frames classified at a time; the first 1.5 s at once, to include some noise without speech
_THRESHOLD = 0.5  # probability of speech
_PAUSE, _SHORT_PAUSE = 0.3, 0.09  # minimum seconds of a pause that cuts a long window, and a window of the maximum length


@dataclass(frozen=True)
class Cut:
    """The sample at which the open window ends.

    `reason`: "pause"; at the maximum length "short pause", or "limit" if there is no pause.
    """

    end: int
    reason: str


class LiveWindows:
    """The samples that no final text covers yet, and the speech in them. Positions are samples since the start of the stream.

    Args:
        size: samples of the longest window.
        pause: samples of silence that end a window.
        vad: as in `transcribe`. False: silence is transcribed too.

    Attributes:
        begin: the first sample that is held.
        length: number of samples that voice detection has classified.
        runs: start and end of each stretch of speech from `begin` on.
    """

    def __init__(self, rate: int, size: int, pause: int, vad: object) -> None:
        self.rate, self.size, self._pause = rate, size, pause
        self._pad = min(int(_PAD * rate), size // 8)
        self.begin = self.length = 0
        self.runs: list[tuple[int, int]] = []
        self._skips, self._frame, self._detector = vad is not False, frame_size(rate), StreamDetector(vad, rate)
        self._buffer = self._unclassified = torch.empty(0)
        self._step = _FIRST_FRAMES

    def add(self, samples: Tensor) -> None:
        self._unclassified = torch.cat([self._unclassified, samples])

    def classify(self, last: bool = False) -> bool:
        """Find the speech in the next frames. Return False if there are too few samples; `last`: no more will come."""
        size = self._step * self._frame
        if len(self._unclassified) < (1 if last else size):
            return False
        part, self._unclassified, self._step = self._unclassified[:size], self._unclassified[size:], _FRAMES
        flags = (self._detector(part) >= _THRESHOLD).tolist()
        earlier = self.length - self._detector.reclassified_frames * self._frame
        if self.begin <= earlier < self.length and not self.runs:  # all of it came after the last text and gap
            self.runs.append((earlier, self.length))
        for index, voiced in enumerate(flags):
            start = self.length + index * self._frame
            if voiced and self.runs and self.runs[-1][1] == start:
                start = self.runs.pop()[0]
            if voiced:
                self.runs.append((start, self.length + min((index + 1) * self._frame, len(part))))
        self._buffer = torch.cat([self._buffer, part])
        self.length += len(part)
        if self._skips and not self.runs:
            self.drop(max(self.begin, self.length - self._pad - PROTECTED_FRAMES * self._frame))
        return True

    @property
    def start(self) -> int | None:
        """The first sample of the open window, or None if no window is open."""
        if not self._skips:
            return self.begin if self.length > self.begin else None
        return max(self.begin, self.runs[0][0] - self._pad) if self.runs else None

    @property
    def end(self) -> int:
        """The last sample of the open window so far."""
        return min(self.length, self.speech_end + self._pad)

    @property
    def speech_end(self) -> int:
        """The end of the speech in the open window so far."""
        return self.runs[-1][1] if self._skips and self.runs else self.length

    @property
    def num_samples(self) -> int:
        """Number of samples in memory."""
        return len(self._buffer) + len(self._unclassified)

    def has_speech(self, end: int) -> bool:
        """Return whether the open window, up to `end`, holds enough speech to be transcribed."""
        spoken = sum(min(b, end) - a for a, b in self.runs if a < end) if self._skips else end - self.begin
        return spoken >= _MIN_SPEECH * self.rate

    def samples(self, start: int, end: int) -> Tensor:
        return self._buffer[start - self.begin : end - self.begin].clone()

    def pauses(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return first and last sample of each stretch without speech; () if silence is transcribed, too."""
        if not self._skips:
            return ()
        edges = [start, *(min(max(at, start), end) for run in self.runs for at in run), end]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)

    def cut(self, last: bool) -> Cut | None:
        """Return where the open window ends, or None if it is not known yet. `last`: no more samples will come."""
        start = self.start
        if start is None:
            return None
        limit = start + self.size
        next_starts = [*(a for a, _ in self.runs[1:]), self.length]
        pauses = [(end, begin) for (_, end), begin in zip(self.runs, next_starts, strict=False)]
        for begin, end in pauses:
            min_pause = self._pause if begin - start < self.size // 2 else min(self._pause, int(_PAUSE * self.rate))
            if begin < limit and end - begin >= min_pause:
                return Cut(min(limit, begin + min(self._pad, (end - begin) // 2)), "pause")
        if self.length >= limit:
            late = [(a, min(b, limit)) for a, b in pauses if start + self.size // 2 <= a < limit]
            begin, end = max(late, key=lambda run: run[1] - run[0], default=(0, 0))
            is_pause = end - begin >= _SHORT_PAUSE * self.rate
            return Cut((begin + end) // 2, "short pause") if is_pause else Cut(limit, "limit")
        return Cut(self.end, "pause") if last else None

    def drop(self, at: int) -> None:
        """Forget everything before the sample `at`."""
        self._buffer = self._buffer[at - self.begin :].clone()
        self.begin = at
        self.runs = [(max(a, at), b) for a, b in self.runs if b > at]

    def jump(self, count: int) -> None:
        """Continue `count` samples later, without the samples between. All samples must have been classified."""
        self.drop(self.length)
        self.begin = self.length = self.length + count
