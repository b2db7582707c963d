"""Loops over many values that let other threads run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_WORK, _REST = 1e-3, 1e-4  # seconds

T = TypeVar("T")


def paced(values: Iterable[T]) -> Iterator[T]:
    """Yield the values, and sleep for 0.1 ms after each millisecond of work.

    Without this, a pure Python loop keeps the interpreter's lock for 5 ms at a time, and an engine step waits for the lock
    after each of its operations.
    """
    start = time.perf_counter()
    for value in values:
        yield value
        if time.perf_counter() - start > _WORK:
            time.sleep(_REST)
            start = time.perf_counter()
