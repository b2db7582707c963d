"""A connector that keeps bytes in this process's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

_ENTRY_BYTES = 512  # that a key takes in the dictionary


class MemoryConnector:
    """Keeps at most `capacity` bytes; those of the keys used least recently are dropped first. See `Connector`."""

    name, is_in_process = "memory", True

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_bytes = capacity, 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def get(self, key: str, limit: int) -> bytes | None:
        with self._lock:
            data = self._entries.get(key)
            if data is not None:
                self._entries.move_to_end(key)
        if data is not None and len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return data

    def put(self, key: str, data: bytes) -> bool:
        size = len(data) + _ENTRY_BYTES
        if size > self.capacity:
            return False
        with self._lock:
            self._drop(key)
            while self.num_bytes + size > self.capacity:
                self._drop(next(iter(self._entries)))
            self._entries[key] = data
            self.num_bytes += size
        return True

    def contains(self, keys: Sequence[str]) -> set[str]:
        with self._lock:
            return {key for key in keys if key in self._entries}

    def delete(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def describe(self) -> str:
        return "memory"

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def _drop(self, key: str) -> None:
        data = self._entries.pop(key, None)
        if data is not None:
            self.num_bytes -= len(data) + _ENTRY_BYTES
