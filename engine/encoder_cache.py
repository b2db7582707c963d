"""Which encoder rows are resident and who still needs them: a dict without eviction. Holds no tensor; the runner does."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..mm.errors import InputError

User = tuple[str, int]  # request id, index of the item in the request


@dataclass
class _Entry:
    num_rows: int
    users: set[User] = field(default_factory=set)
    encoded: bool = False


class EncoderCache:
    """Content-addressed, counted by use. An entry goes when its last user is done with it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._freed: list[str] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        """Whether the rows are resident (or will be by the time this step's forward runs)."""
        entry = self._entries.get(key)
        return entry is not None and entry.encoded

    def acquire(self, key: str, num_rows: int, user: User) -> None:
        """The user will read these rows; InputError when another user's item of the same hash has other rows."""
        entry = self._entries.setdefault(key, _Entry(num_rows))
        if entry.num_rows != num_rows:
            raise InputError(f"item {user[1]}: its hash stands for {entry.num_rows} encoder rows, here it has {num_rows}")
        entry.users.add(user)

    def mark_encoded(self, key: str) -> None:
        self._entries[key].encoded = True

    def mark_failed(self, key: str) -> None:
        """The encoder raised: nothing is resident."""
        if key in self._entries:
            self._entries[key].encoded = False

    def release(self, key: str, user: User) -> None:
        """The user is done; unknown users are ignored, so releasing twice is harmless."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.users.discard(user)
        if not entry.users:
            del self._entries[key]
            self._freed.append(key)

    def refree(self, keys: tuple[str, ...]) -> None:
        """Say these again: the runner may not have heard."""
        self._freed.extend(keys)

    def take_freed(self) -> tuple[str, ...]:
        """Hashes whose rows the runner may drop, once; those wanted and encoded again meanwhile are not among them."""
        freed, self._freed = tuple(key for key in dict.fromkeys(self._freed) if key not in self), []
        return freed
