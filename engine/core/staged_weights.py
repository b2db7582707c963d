"""The updates of weights that a core's process has taken, for the process that replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Set

from .channel import Packed, discard, duplicate


class _Update:
    """An update's message. Its descriptor is closed with this object, in whichever thread drops it last."""

    def __init__(self, names: Set[str], message: Packed) -> None:
        self.names, self.message = names, message

    def __del__(self) -> None:
        discard(self.message)


class StagedWeights:
    """Messages whose tensors lie in shared memory, which the core's process reads, too: they take no further memory."""

    def __init__(self) -> None:
        self._updates: list[_Update] = []

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, names: Set[str], message: Packed) -> None:
        """Keep the message of an update, and forget those of which later ones have all names."""
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
