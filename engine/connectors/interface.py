"""The protocol of a connector, which keeps bytes by key outside an engine's caches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

KEY = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}(\.\d{1,9})?")
"""A key: the namespace (a digest of all that the content depends on besides its own hash), "/", the hash of the content, and
the number of a part of it, if it has parts. Keys are safe as names of files."""


class Connector(Protocol):
    """Keeps bytes by key, up to its capacity, and may lose any of them at any time. Several threads may call it.

    It does not check what it keeps: `TensorStore` verifies key, checksum, shape and dtype of all that it gets.

    Attributes:
        name: "memory", "shared_memory", "disk", "peer" or "redis", as statistics and metrics call it.
        is_in_process: it keeps bytes in this process. What is found in other connectors is then copied into it.

    Methods raise OSError if the memory, folder or server behind it cannot be reached or does not answer in time.
    """

    name: str
    is_in_process: bool

    def get(self, key: str, limit: int) -> bytes | None:
        """Return the bytes of a key, None if there are none. Raise ValueError if they are more than `limit` or malformed."""

    def put(self, key: str, data: bytes) -> bool:
        """Keep the bytes, in place of others of this key. Return False, and keep nothing, if they exceed the capacity."""

    def contains(self, keys: Sequence[str]) -> set[str]:
        """Return those of the keys that it has now."""

    def delete(self, key: str) -> None:
        """Delete a key whose bytes were damaged. Unknown keys are ignored."""

    def describe(self) -> str:
        """Return its name for warnings, such as "the folder /cache"."""

    def close(self) -> None:
        """Free memory, connections and threads."""
