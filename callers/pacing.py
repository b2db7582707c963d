"""An iterator for long Python loops that lets other threads run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

_WORK_SECONDS, _SLEEP_SECONDS = 1e-3, 1e-4

T = TypeVar("T")


def releasing_gil(values: Iterable[T]) -> Iterator[T]:
    """Yield the values, and sleep for 0.1 ms after each millisecond of work.

    Otherwise a pure Python loop holds the GIL for 5 ms at a time, and an engine step waits for it after each of its
    operations.
    """
    start = time.perf_counter()
    for value in values:
        yield value
        if time.perf_counter() - start > _WORK_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            start = time.perf_counter()
