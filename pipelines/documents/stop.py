"""Ends a reading from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from ...callers.errors import InputError
from ...mm.media.isolate import Interrupt

T = TypeVar("T")


class ReadingStopped(Exception):
    """The reading was stopped; no page ends with this error."""


class StopSignal:
    """Tells the threads of a reading to end. The pages in work have no records then, and are read again by the next run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._running: Future[object] | None = None
        self._interrupt = Interrupt()

    def set(self) -> None:
        """End the reading: what `wait` waits for is cancelled, workers in `run` are killed, and `check` raises from now on."""
        with self._lock:
            self._is_set, running = True, self._running
        self._interrupt.stop()
        if running is not None:
            running.cancel()

    def check(self) -> None:
        """Raise ReadingStopped after `set`."""
        if self._is_set:
            raise ReadingStopped

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of work in codec workers. Any number of threads may run some.

        Raises:
            ReadingStopped: `set` was called before the work ended, which then may have failed at any point.
        """
        self.check()
        try:
            result = self._interrupt.run(work)
        except InputError:
            self.check()
            raise
        self.check()
        return result

    def wait(self, submit: Callable[[], Future[T]]) -> T:
        """Return the result of the work that `submit` begins. One thread at a time may wait."""
        with self._lock:
            self.check()
            future = submit()
            self._running = future  # type: ignore[assignment]
        try:
            return future.result()
        except CancelledError:
            raise ReadingStopped from None
        finally:
            with self._lock:
                self._running = None
