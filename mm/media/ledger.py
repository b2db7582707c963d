"""Bytes of media that requests hold: a limit for each request, and a budget for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ...callers.errors import InputError
from .policy import MediaPolicy

T = TypeVar("T")


class MediaBudget:
    """Bytes that all requests of an engine hold. Thread-safe.

    A download waits while its request, or all requests of its tenant together, would hold more bytes than remain free. One
    large request therefore takes at most half of `max_total_bytes`, and n of them n / (n + 1); the rest stays free for small
    ones. Downloads of the oldest request never wait (dynamic thresholds for shared buffers, Choudhury and Hahne, 1998).
    All requests in the background together count as one: they take at most half.
    """

    def __init__(self, policy: MediaPolicy) -> None:
        self.policy = policy
        self.changed = threading.Condition()
        self.holders: set[Ledger] = set()

    @property
    def num_bytes(self) -> int:
        return sum(ledger.num_bytes for ledger in self.holders)

    @property
    def is_full(self) -> bool:
        with self.changed:
            return self.num_bytes >= self.policy.max_total_bytes

    def open(self, tenant: str | None = None) -> Ledger:
        """Return the ledger of a new request. Requests without a tenant count separately."""
        return Ledger(self, tenant)


class Ledger:
    """Bytes that one request holds. Equal files, texts and buffers are read once.

    `background`: the request is served after others, such as a line of a batch.
    """

    def __init__(self, budget: MediaBudget, tenant: str | None = None) -> None:
        self._budget, self._tenant, self._begun = budget, tenant, time.monotonic()
        self._read: dict[object, Any] = {}
        self.num_bytes = self._taken = 0  # _taken: without tensors
        self.deadline: float | None = None
        self.closed = self.background = False
        self._ends: list[Callable[[], object]] = []  # of running downloads

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting the request's bytes. Downloads that still run for it fail."""
        with self._budget.changed:
            self.closed = True
            self._read = {}
            self._budget.holders.discard(self)
            self._budget.changed.notify_all()
            for end in self._ends:
                end()

    @contextmanager
    def watching(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` if the request ends inside the context. Raise InputError if it has ended before."""
        with self._budget.changed:
            self.check_open()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._budget.changed:
                self._ends.remove(end)

    def check_open(self) -> None:
        """Raise InputError if the request has ended."""
        if self.closed:
            raise InputError("its request has ended")

    def start(self) -> float:
        """Return the deadline of all downloads of the request. The first call sets it."""
        with self._budget.changed:
            if self.deadline is None:
                self.deadline = time.monotonic() + self._budget.policy.max_request_seconds
            return self.deadline

    def hold(self, size: int) -> None:
        """Count the bytes of tensors, which the budget includes but the limit of the request does not."""
        with self._budget.changed:
            if not self.closed:
                self._budget.holders.add(self)
                self.num_bytes += size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes as `hold` does until the block ends."""
        self.hold(size)
        try:
            yield
        finally:
            self.hold(-size)
            with self._budget.changed:
                self._budget.changed.notify_all()

    def take(self, size: int, wait: bool = False) -> float:
        """Count bytes that are about to be read, and return the seconds that `wait` took.

        Raises:
            InputError: the request holds more than its limit, was dropped, or has waited too long.
        """
        policy, start = self._budget.policy, time.monotonic()
        with self._budget.changed:
            while not self._has_room(size, wait):
                left = (self.deadline or start) - time.monotonic()
                if left <= 0:
                    reason = f"media of other requests leave no room (media: max_total_bytes, {policy.max_total_bytes:,})"
                    raise InputError(f"{reason}; send it again later", code="overloaded")
                self._budget.changed.wait(left)
            self._taken += size
            self.num_bytes += size
        return time.monotonic() - start

    def once(self, key: object, size: int, read: Callable[[], T]) -> T:
        """Return `read()`, of `size` bytes. Later calls with the same key return the same and count nothing."""
        if key not in self._read:
            self.take(size)
            self._read[key] = read()
        result: T = self._read[key]
        return result

    def _has_room(self, size: int, wait: bool) -> bool:
        """Return whether the bytes may be read now; InputError if they never may."""
        budget, most = self._budget, self._budget.policy.max_request_bytes
        self.check_open()
        if self._taken + size > most:
            reason = f"the media of its request are more than {most:,} bytes (media: max_request_bytes)"
            raise InputError(f"{reason}; send fewer or smaller items", code="over_limit", limit=most, value=self._taken + size)
        budget.holders.add(self)
        if not wait or self is min(budget.holders, key=lambda ledger: ledger._begun):
            return True
        num_bytes = sum(holder.num_bytes for holder in budget.holders if self._shares_with(holder)) + size
        return num_bytes <= budget.policy.max_total_bytes - budget.num_bytes - size

    def _shares_with(self, other: Ledger) -> bool:
        """Return whether the bytes of both count as those of one request."""
        same = self._tenant is not None and self._tenant == other._tenant
        return other is self or same or (self.background and other.background)
