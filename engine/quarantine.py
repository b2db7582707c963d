"""What to do with items that break the encoder: find them among others, refuse them for a time. Knows no model and no queue."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..mm.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_ITEMS = 4096  # refused at a time; the ones longest there go first
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


class Quarantine:
    """Hashes of items that broke the encoder, for `seconds` each; 0 for none. A hash has its tenant's salt in it.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._until: OrderedDict[str, float] = OrderedDict()  # in order of time, since all stay equally long

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: str) -> None:
        """Refuse the item from now on."""
        if not self._seconds:
            return
        self._until[key] = self._clock() + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > _MAX_ITEMS:
            self._until.popitem(last=False)

    def check(self, key: str, name: str) -> None:
        """InputError for an item that is refused; `name` is the item's in the message, such as "image 0"."""
        left = self._until.get(key, -math.inf) - self._clock()
        if left > 0:
            raise InputError(
                f"{name}: this item broke the encoder before and is refused for another {math.ceil(left)} s; "
                "send another one, or ask again then"
            )
        self._until.pop(key, None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host: a matter of the moment, not of the item."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MEMORY_TEXTS)


def bisect(items: Sequence[Item], attempt: Callable[[Sequence[Item]], Sequence[Result]]) -> list[Result | Exception]:
    """What `attempt` makes of each item, or the error it raises for that item alone, in order.

    A failing call is halved until the bad items are alone: at most `1 + 2 k ceil(log2 n)` calls for k bad items of n.
    """
    if not items:
        return []
    try:
        results = list(attempt(items))
        if len(results) != len(items):
            raise RuntimeError(f"{len(results)} results for {len(items)} items")
        return list(results)
    except Exception as error:
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return bisect(items[:middle], attempt) + bisect(items[middle:], attempt)
