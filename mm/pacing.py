"""Loops over many values of a caller that leave the interpreter to other threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_WORK, _REST = 1e-3, 1e-4  # seconds

T = TypeVar("T")


def paced(values: Iterable[T]) -> Iterator[T]:
    """Yield the values, and sleep for 0.1 ms after each millisecond.

    A thread that computes in pure Python gives the interpreter's lock away after 5 ms only, and a step of the engine takes
    the lock again after each of its operations.
    """
    start = time.perf_counter()
    for value in values:
        yield value
        if time.perf_counter() - start > _WORK:
            time.sleep(_REST)
            start = time.perf_counter()
