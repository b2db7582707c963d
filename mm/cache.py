"""Content-addressed caches with a byte limit, and the table of the callers' uuids."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..callers.errors import InputError
from .hashing import digest
from .tenants import tenant_of

V = TypeVar("V")
_MAX_TENANTS = 4096


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start; `entries` and `bytes` are current values."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0


class ByteCache(Generic[V]):
    """LRU cache of values by key, up to `capacity` bytes. Thread-safe.

    If several threads ask for a value, one of them makes it. A value larger than the cache is returned but not kept.
    """

    def __init__(self, capacity: int, size: Callable[[V], int]) -> None:
        self.capacity, self._size, self._lock = capacity, size, threading.Lock()
        self._kept: OrderedDict[str, V] = OrderedDict()
        self._making: dict[str, Future[V]] = {}
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: str) -> V | None:
        """Return the value, or None, and count a hit or a miss. A hit becomes the most recently used value."""
        with self._lock:
            if key in self._kept:
                self._hits += 1
                self._kept.move_to_end(key)
                return self._kept[key]
            self._misses += 1
            return None

    def make(self, key: str, maker: Callable[[], V]) -> V:
        """Return the value after a miss: `maker()`, or the value that another thread makes or has just made.

        Counts neither a hit nor a miss. An exception of `maker` is raised in every thread that waits for it, and is not cached.
        """
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            mine = key not in self._making
            future = self._making.setdefault(key, Future())
        if mine:
            self._run(key, maker, future)
        try:
            return future.result()
        finally:
            del future  # it holds the error, whose traceback holds this frame and the media in it

    def clear(self) -> None:
        """Drop all values. This does not count as evictions."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(self._hits, self._misses, self._evictions, len(self._kept), self._bytes)

    def _run(self, key: str, maker: Callable[[], V], future: Future[V]) -> None:
        try:
            value = maker()
        except BaseException as error:  # waiting threads must never hang; this thread gets it from the future
            with self._lock:
                del self._making[key]
            future.set_exception(error)
            del future  # as in `make`
            return
        with self._lock:
            del self._making[key]
            self._keep(key, value)
        future.set_result(value)

    def _keep(self, key: str, value: V) -> None:
        size = self._size(value)
        if size > self.capacity:
            return
        self._kept[key] = value
        self._bytes += size
        while self._bytes > self.capacity:
            self._bytes -= self._size(self._kept.popitem(last=False)[1])
            self._evictions += 1


class UuidTable:
    """The content hash of each uuid, per `cache_salt`.

    Beyond `max_uuids`, the tenant with the most uuids loses its least recently used one.
    """

    def __init__(self, max_uuids: int = 1 << 16) -> None:
        self._max_uuids, self._lock = max_uuids, threading.Lock()
        # tenant -> salt and uuid -> content hash, both least recently used first
        self._tenants: OrderedDict[str, OrderedDict[str, str]] = OrderedDict()
        self._count = 0

    def find(self, salt: str | None, name: str) -> str | None:
        """Return the content hash of the uuid, or None."""
        owner, key = _keys(salt, name)
        with self._lock:
            names = self._tenants.get(owner)
            if names is None or key not in names:
                return None
            self._tenants.move_to_end(owner)
            names.move_to_end(key)
            return names[key]

    def check(self, salt: str | None, name: str, content: str) -> None:
        """Raise InputError if the uuid stands for other content."""
        if self.find(salt, name) not in (None, content):
            raise _taken_error(name)

    def bind(self, salt: str | None, name: str, content: str) -> None:
        """Bind the uuid to this content; InputError if it stands for other content."""
        owner, key = _keys(salt, name)
        with self._lock:
            names = self._tenants.setdefault(owner, OrderedDict())
            self._tenants.move_to_end(owner)
            self._count += key not in names
            if names.setdefault(key, content) != content:
                raise _taken_error(name)
            names.move_to_end(key)
            while self._count > self._max_uuids:
                max(self._tenants.values(), key=len).popitem(last=False)
                self._count -= 1
            while len(self._tenants) > _MAX_TENANTS:
                self._count -= len(self._tenants.popitem(last=False)[1])


def _keys(salt: str | None, name: str) -> tuple[str, str]:
    """Return the keys of the tenant and of its salt and uuid. They have a fixed size, however long these are."""
    return digest("tenant", tenant_of(salt)), digest("uuid", salt, name)


def _taken_error(name: str) -> InputError:
    return InputError(f"the uuid {name[:80]!r} already stands for other content; give new content a new uuid", param="uuid")
