"""Which encoder rows are resident and who reads them: bytes are counted, no tensor is held; the runner does that.

Capacity 10 and an item of 4: 6 are free. When its last reader is done it stays, and all 10 can be had: a new item drops the
rows that were read longest ago, but only when it must.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..mm.errors import InputError

User = tuple[str, int]  # request id, index of the item in the request


@dataclass
class _Entry:
    num_rows: int
    holders: set[User] = field(default_factory=set)  # live sequences that have the item
    readers: set[User] = field(default_factory=set)  # those that are computing it: the rows must stay
    asker: User | None = None  # for whom the rows were made, until it has computed the item


class EncoderCache:
    """Content-addressed and capped in bytes.

    Args:
        capacity: bytes of rows that may be resident.
        row_bytes: of one row.
    """

    def __init__(self, capacity: int, row_bytes: int) -> None:
        self.capacity, self.row_bytes = capacity, row_bytes
        self._entries: dict[str, _Entry] = {}
        self._resident: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._dropped: list[str] = []
        self.coming: set[str] = set()  # resident, but not made yet
        self.bytes = self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: str) -> bool:
        """Whether the rows are resident (or will be by the time this step's forward runs)."""
        return key in self._resident

    def hold(self, key: str, num_rows: int, user: User) -> None:
        """The user may read these rows until `release`; InputError when they can never be held or their hash is taken."""
        if num_rows * self.row_bytes > self.capacity:
            size = f"its {num_rows} encoder rows take {num_rows * self.row_bytes} bytes"
            raise InputError(f"item {user[1]}: {size}, encoder_cache_bytes is {self.capacity}; make it smaller or raise that")
        entry = self._entries.setdefault(key, _Entry(num_rows))
        if entry.num_rows != num_rows:
            raise InputError(f"item {user[1]}: its hash stands for {entry.num_rows} encoder rows, here it has {num_rows}")
        entry.holders.add(user)

    def read(self, key: str, user: User) -> bool | None:
        """Keep the rows until `unread`: True when they are here, False when they have to be made, None for no room."""
        entry = self._entries[key]
        if key in self._resident:
            self._resident.move_to_end(key)
            entry.readers.add(user)
            return True
        if not self._make_room(entry.num_rows * self.row_bytes):
            return None
        self.misses += 1
        self.bytes += entry.num_rows * self.row_bytes
        self._resident[key] = None
        entry.readers.add(user)
        entry.asker = user
        return False

    def postpone(self, key: str) -> None:
        """Rows that `read` said are to be made are made beside steps: they are coming until `arrive`."""
        self.coming.add(key)

    def arrive(self, key: str) -> None:
        """The rows are there; harmless for others."""
        self.coming.discard(key)

    def computed(self, key: str, user: User) -> None:
        """The user has computed the item; a hit, unless the rows were made for that."""
        entry = self._entries.get(key)
        if entry is not None and user in entry.readers:
            self.hits += user != entry.asker
            entry.asker = None if user == entry.asker else entry.asker
            entry.readers.discard(user)

    def unread(self, key: str, user: User) -> None:
        """The user was interrupted: the rows need not stay for it."""
        if key in self._entries:
            self._entries[key].readers.discard(user)

    def release(self, key: str, user: User) -> None:
        """The user is done; unknown users are ignored, so releasing twice is harmless."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.holders.discard(user)
        entry.readers.discard(user)
        entry.asker = None if entry.asker == user else entry.asker
        self._tidy(key)

    def fail(self, key: str) -> None:
        """The rows could not be made: nothing is resident."""
        if key in self._resident:
            self._drop(key)

    def holders(self, key: str) -> list[str]:
        """Ids of the requests that have the item."""
        entry = self._entries.get(key)
        return [] if entry is None else sorted({request_id for request_id, _ in entry.holders})

    def forget_all(self) -> None:
        """No rows are resident any more; only while nobody reads any."""
        for key in tuple(self._resident):
            self._drop(key)

    def drop_again(self, keys: tuple[str, ...]) -> None:
        """Say these once more: the runner may not have heard."""
        self._dropped.extend(keys)

    def take_dropped(self) -> tuple[str, ...]:
        """Hashes whose rows the runner has to drop, once; those made again meanwhile are not among them."""
        dropped, self._dropped = tuple(key for key in dict.fromkeys(self._dropped) if key not in self), []
        return dropped

    def _make_room(self, size: int) -> bool:
        idle = [key for key in self._resident if not self._entries[key].readers]
        fixed = self.bytes - sum(self._entries[key].num_rows for key in idle) * self.row_bytes
        if fixed + size > self.capacity:
            return False
        for key in idle:
            if self.bytes + size <= self.capacity:
                break
            self._drop(key)
            self.evictions += 1
        return True

    def _drop(self, key: str) -> None:
        del self._resident[key]
        self.coming.discard(key)
        self.bytes -= self._entries[key].num_rows * self.row_bytes
        self._dropped.append(key)
        self._tidy(key)

    def _tidy(self, key: str) -> None:
        entry = self._entries[key]
        if key not in self._resident and not entry.holders:
            del self._entries[key]
