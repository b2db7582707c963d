"""Keeps the weight updates of a core's process, so that a process that replaces it gets the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Set

from .channel import Packed, discard, duplicate


class _Update:
    """The message of an update. Its descriptor is closed when the last reference to this object is dropped, in any thread."""

    def __init__(self, names: Set[str], message: Packed) -> None:
        self.names, self.message = names, message

    def __del__(self) -> None:
        discard(self.message)


class StagedWeights:
    """Messages of updates. Their tensors are in shared memory that the core's process reads, so they cost no further memory."""

    def __init__(self) -> None:
        self._updates: list[_Update] = []

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, names: Set[str], message: Packed) -> None:
        """Keep the message of an update, and drop messages all of whose names are in later ones."""
        later, kept = set[str](), list[_Update]()
        for update in reversed([*self._updates, _Update(names, message)]):
            if not update.names <= later:
                kept.append(update)
            later |= update.names
        self._updates = kept[::-1]

    def messages(self) -> Iterator[Packed]:
        """Yield the messages in their order, for `Channel.send`. Raise MemoryError if there is no descriptor."""
        return (duplicate(update.message) for update in self._updates)

    def forget(self) -> None:
        """Free all messages."""
        self._updates = []
