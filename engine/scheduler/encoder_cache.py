"""Bookkeeping of the encoder cache: which items' encoder rows are resident, and which sequences pin them.

The rows themselves are in `engine.worker.encoder_store`; the scheduler tells the worker which to encode and which to free.

Items that no sequence pins stay resident until a new item needs their room: it evicts the least recently used items, and only
as many as it has to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from ...callers.errors import InputError

ItemUser = tuple[str, int]  # request id, index of the item in the request


class PinResult(Enum):
    RESIDENT = "resident"
    TO_ENCODE = "to encode"  # room is reserved; the caller has to send an EncodeTask
    NO_ROOM = "no room"


@dataclass
class _Entry:
    num_rows: int
    users: set[ItemUser] = field(default_factory=set)  # live sequences that have the item
    pinned_by: set[ItemUser] = field(default_factory=set)  # users that are computing it: the rows must stay
    encoded_for: ItemUser | None = None  # the user the rows were made for, until it has computed the item


class EncoderCache:
    """A content-addressed cache of encoder rows with a capacity in bytes.

    Args:
        capacity: maximum bytes of resident rows.
        row_bytes: bytes of one row.
    """

    def __init__(self, capacity: int, row_bytes: int) -> None:
        self.capacity, self.row_bytes = capacity, row_bytes
        self._entries: dict[str, _Entry] = {}
        self._resident: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._freed: list[str] = []
        self.pending: set[str] = set()  # keys whose reserved rows are still being encoded beside steps
        self.bytes = self.hits = self.misses = self.evictions = 0

    def __contains__(self, key: str) -> bool:
        """True if the rows are resident, or will be before the forward of this step."""
        return key in self._resident

    def register(self, key: str, num_rows: int, user: ItemUser) -> None:
        """Register a live sequence that has the item.

        Raises:
            InputError: the rows exceed the capacity, or the hash belongs to an item with another number of rows.
        """
        if num_rows * self.row_bytes > self.capacity:
            size = f"its {num_rows} encoder rows take {num_rows * self.row_bytes} bytes"
            reason = f"{size}, but <<encoder_cache_bytes>> is {self.capacity}; raise it or make the item smaller"
            raise InputError(reason, code="too_long", limit=self.capacity, value=num_rows * self.row_bytes)
        entry = self._entries.setdefault(key, _Entry(num_rows))
        if entry.num_rows != num_rows:
            mismatch = f"its uuid belongs to another item, of {entry.num_rows} encoder rows where this one has {num_rows}"
            raise InputError(f"{mismatch}; give it another uuid")
        entry.users.add(user)

    def unregister(self, key: str, user: ItemUser) -> None:
        """Remove a sequence from the users of the item, and unpin it. Unknown users are ignored."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.users.discard(user)
        entry.pinned_by.discard(user)
        entry.encoded_for = None if entry.encoded_for == user else entry.encoded_for
        self._remove_unused(key)

    def users_of(self, key: str) -> list[str]:
        """Return the ids of the requests that have the item."""
        entry = self._entries.get(key)
        return [] if entry is None else sorted({request_id for request_id, _ in entry.users})

    def pin(self, key: str, user: ItemUser) -> PinResult:
        """Keep the rows resident until `unpin` or `mark_computed`; reserve room for them if they are not resident."""
        entry = self._entries[key]
        if key in self._resident:
            self._resident.move_to_end(key)
            entry.pinned_by.add(user)
            return PinResult.RESIDENT
        if not self._make_room(entry.num_rows * self.row_bytes):
            return PinResult.NO_ROOM
        self.misses += 1
        self.bytes += entry.num_rows * self.row_bytes
        self._resident[key] = None
        entry.pinned_by.add(user)
        entry.encoded_for = user
        return PinResult.TO_ENCODE

    def unpin(self, key: str, user: ItemUser) -> None:
        """Undo `pin` for a sequence that does not compute the item now. Unknown users are ignored."""
        if key in self._entries:
            self._entries[key].pinned_by.discard(user)

    def mark_computed(self, key: str, user: ItemUser) -> None:
        """Unpin rows whose tokens the sequence has computed. Counts as a hit unless the rows were made for this sequence."""
        entry = self._entries.get(key)
        if entry is not None and user in entry.pinned_by:
            self.hits += user != entry.encoded_for
            entry.encoded_for = None if user == entry.encoded_for else entry.encoded_for
            entry.pinned_by.discard(user)

    def discard(self, key: str) -> None:
        """Free rows that could not be encoded or are no longer needed."""
        if key in self._resident:
            self._free(key)

    def reset(self) -> None:
        """Free all rows. No sequence may pin any."""
        for key in tuple(self._resident):
            self._free(key)

    def take_freed(self) -> tuple[str, ...]:
        """Return the hashes whose rows the worker has to free, each once. Hashes that were reserved again are left out."""
        freed, self._freed = tuple(key for key in dict.fromkeys(self._freed) if key not in self), []
        return freed

    def requeue_freed(self, keys: tuple[str, ...]) -> None:
        """Make `take_freed` return these hashes again, because the worker may not have received them."""
        self._freed.extend(keys)

    def _make_room(self, size: int) -> bool:
        unpinned = [key for key in self._resident if not self._entries[key].pinned_by]
        pinned_bytes = self.bytes - sum(self._entries[key].num_rows for key in unpinned) * self.row_bytes
        if pinned_bytes + size > self.capacity:
            return False
        for key in unpinned:
            if self.bytes + size <= self.capacity:
                break
            self._free(key)
            self.evictions += 1
        return True

    def _free(self, key: str) -> None:
        del self._resident[key]
        self.pending.discard(key)
        self.bytes -= self._entries[key].num_rows * self.row_bytes
        self._freed.append(key)
        self._remove_unused(key)

    def _remove_unused(self, key: str) -> None:
        entry = self._entries[key]
        if key not in self._resident and not entry.users:
            del self._entries[key]
