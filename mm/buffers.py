"""Large buffers that are used again: fresh pages cost more than the work that fills them. Knows no media."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1 << 20  # bytes; below it the allocator reuses memory by itself
_STEPS = 8  # sizes kept apart between one power of two and the next


class BufferPool:
    """Hands out uninitialised tensors whose memory comes back when they and all their views are gone. Thread-safe.

    Args:
        capacity: bytes of idle buffers that are kept; what comes back beyond it is freed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._idle_bytes = capacity, 0
        self._idle: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self._lock = threading.RLock()  # a buffer may come back while this very thread collects garbage inside `take`

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with any content."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(tuple(shape), dtype=dtype)
        room = _rounded(size)
        with self._lock:
            known = self._idle[room]
            if known:
                self._idle_bytes -= room
            base = known.pop() if known else np.empty(room, np.uint8)
        loan = base[:size]  # torch holds this array, and lets go of it with the last view
        weakref.finalize(loan, self._come_back, base).atexit = False
        return torch.from_numpy(loan).view(dtype).view(tuple(shape))

    def _come_back(self, base: np.ndarray[Any, Any]) -> None:
        with self._lock:
            if self._idle_bytes + base.nbytes <= self._capacity:
                self._idle[base.nbytes].append(base)
                self._idle_bytes += base.nbytes


def _rounded(size: int) -> int:
    """The next of eight sizes per power of two, so that a buffer fits its neighbours and wastes an eighth at most."""
    step = 1 << max(0, size.bit_length() - 1 - _STEPS.bit_length() + 1)
    return -(-size // step) * step


BUFFERS = BufferPool(256 << 20)
"""For processed items and merged batches."""
