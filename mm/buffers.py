"""A pool that reuses large buffers, because the page faults of fresh memory cost more than filling it."""

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

_SMALLEST = 1 << 20  # bytes; the allocator reuses smaller buffers by itself
_STEPS = 8  # buffer sizes per power of two


class BufferPool:
    """Hand out uninitialised tensors and take their memory back when they and all their views are gone. Thread-safe.

    Args:
        capacity: bytes of idle buffers that are kept; more is freed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._idle_bytes = capacity, 0
        self._idle: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self._lock = threading.RLock()  # garbage collection inside `take` may return a buffer in the same thread

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(tuple(shape), dtype=dtype)
        room = _rounded(size)
        with self._lock:
            idle = self._idle[room]
            if idle:
                self._idle_bytes -= room
            base = idle.pop() if idle else np.empty(room, np.uint8)
        loan = base[:size]  # torch holds this array and releases it with the last view
        weakref.finalize(loan, self._come_back, base).atexit = False
        return torch.from_numpy(loan).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Free the idle buffers. Buffers in use are not affected."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    def _come_back(self, base: np.ndarray[Any, Any]) -> None:
        with self._lock:
            if self._idle_bytes + base.nbytes <= self._capacity:
                self._idle[base.nbytes].append(base)
                self._idle_bytes += base.nbytes


def _rounded(size: int) -> int:
    """Round up to one of eight sizes per power of two, so that buffers are reused and at most an eighth is wasted."""
    step = 1 << max(0, size.bit_length() - 1 - _STEPS.bit_length() + 1)
    return -(-size // step) * step


BUFFERS = BufferPool(256 << 20)
"""Buffers for processed items and merged batches."""
