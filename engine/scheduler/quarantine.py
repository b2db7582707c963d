"""Quarantine of items that made the encoder fail."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ...callers.errors import MediaError
from ...mm.types import MultiModalFeature, find_item

_MAX_ITEMS = 4096  # beyond it, the oldest item is admitted again


class Quarantine:
    """Refuses failing items, by hash, for `seconds` each; 0 refuses none. A hash includes its tenant's salt.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._until: OrderedDict[str, float] = OrderedDict()  # ordered by expiry: all items stay equally long

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

    def check_items(self, features: Sequence[MultiModalFeature]) -> None:
        """Raise MediaError if one of the items is refused."""
        for feature in features:
            self.check(feature.hash, *find_item(features, feature.hash))

    def check(self, key: str, modality: str, index: int) -> None:
        """Raise MediaError if the item is refused. The error names it by modality and index."""
        left = self._until.get(key, -math.inf) - self._clock()
        if left > 0:
            reason = f"this item made the encoder fail before and is refused for another {math.ceil(left)} s"
            raise MediaError(modality, index, f"{reason}; send another one, or try again after that", code="encoder_failed")
        self._until.pop(key, None)
