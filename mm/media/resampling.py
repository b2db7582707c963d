"""Resampling of mono samples to a model's rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RATE_TOLERANCE = 1e-6  # hertz; closer rates are equal


class Resampling:
    """Resamples the mono pieces of one rate, `ceil(n * rate / source)` samples in all."""

    def __init__(self, source: float, rate: float) -> None:
        self.source, self._rate = source, rate
        self._stream = make_resampler(source, rate)
        self._taken = self._made = 0

    def add(self, piece: Array) -> Array:
        self._taken += len(piece)
        if self._stream is not None:
            piece = self._stream.resample_chunk(np.ascontiguousarray(piece))
        self._made += len(piece)
        return piece

    def flush(self) -> Array:
        """Return the samples that the resampler still holds."""
        if self._stream is None:
            return np.empty(0, np.float32)
        rest = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        due = resampled_count(self._taken, self.source, self._rate) - self._made
        padded: Array = np.pad(rest[:due], (0, max(0, due - len(rest))))
        return padded


def make_resampler(source: float, target: float) -> Any:
    """Return a resampler, or None for equal rates."""
    if abs(source - target) < RATE_TOLERANCE:
        return None
    import soxr

    return soxr.ResampleStream(source, target, 1, dtype="float32", quality="HQ")


def resampled_count(frames: int, source: float, target: float) -> int:
    """Return the number of samples after resampling from rate `source` to rate `target`."""
    return frames if abs(source - target) < RATE_TOLERANCE else math.ceil(frames * target / source)
