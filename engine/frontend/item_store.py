"""Processed items in connectors, so that engines which share them process an item once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ...mm.fields import FieldElem
from ...mm.types import FramePlan, ItemGeometry
from ..connectors.backoff import Backoff
from ..connectors.packing import BytesSpec
from ..connectors.tensor_store import QUEUE_BYTES, TensorStore
from ..stats import TransferStats
from .items import ProcessedItem

_READ_SECONDS = 2.0  # how long an item waits for its copy; it is then processed
_THREADS = 4  # items that are read at a time
_ITEM = "item"  # the name of an item's tensor
_log = logging.getLogger(__name__)


class ItemStore:
    """Processed items by the hash of their content, options, model and tenant. Media workers call it.

    Args:
        encode, decode: those of the messages to the core.
    """

    def __init__(self, store: TensorStore, encode: Callable[[object], bytes], decode: Callable[[bytes], Any]) -> None:
        self.store, self._encode, self._decode, self._backoff = store, encode, decode, Backoff()
        self._readers = ThreadPoolExecutor(_THREADS, "sensorium-items")

    @property
    def stats(self) -> tuple[TransferStats, ...]:
        return self.store.stats

    def get(self, key: str) -> ProcessedItem | None:
        """Return a verified item, or None if there is none or reading it takes too long."""
        try:
            self._backoff.check(_ITEM)
            found = self._readers.submit(self.store.get, key, {_ITEM: BytesSpec(QUEUE_BYTES)}).result(_READ_SECONDS)
        except TimeoutError:
            self._backoff.record_failure()
            self.store.count_late()
            return None
        except ConnectionError:  # it was late a short time ago
            return None
        return None if found is None else self._unpacked(found.tensors[_ITEM])

    def put(self, key: str, item: ProcessedItem) -> None:
        """Write an item in the background, unless it is too large."""
        data = self._encode((item.pieces, item.size, item.frames, item.seconds))
        if len(data) <= QUEUE_BYTES:
            self.store.put(key, {_ITEM: torch.frombuffer(bytearray(data), dtype=torch.uint8)})

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _unpacked(self, data: torch.Tensor) -> ProcessedItem | None:
        """Return the item that `put` has encoded, None for something else."""
        try:
            pieces, size, frames, seconds = self._decode(data.numpy().tobytes())
            is_item = bool(pieces) and all(_is_piece(*piece) for piece in pieces) and isinstance(frames, FramePlan | None)
            item = ProcessedItem(pieces, (int(size[0]), int(size[1])), frames, float(seconds))
        except Exception as error:  # what is decoded may be anything
            _log.warning("a processed item cannot be read (%s: %s); it is processed again", type(error).__name__, error)
            return None
        return item if is_item else None


def _is_piece(kwargs: object, geometry: object) -> bool:
    elems = kwargs.values() if isinstance(kwargs, dict) else ()
    return bool(elems) and all(isinstance(elem, FieldElem) for elem in elems) and isinstance(geometry, ItemGeometry)
