"""Items to encoder rows: many in one call, at once or beside what else a device does. Knows no sequence and no block."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..mm.embeddings import ROWS
from ..mm.errors import InputError
from ..mm.fields import group, merge
from ..mm.types import MultiModalFeature
from ..models.interface import Model
from .encoder_graphs import EncoderGraphs
from .encoder_store import EncoderStore
from .failures import describe
from .quarantine import bisect, is_out_of_memory
from .staging import fetch
from .types import EncodeResult

Items = Sequence[MultiModalFeature]
_log = logging.getLogger(__name__)


class Event(Protocol):
    """What of torch.cuda.Event is used."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _Done:
    """On a CPU a call is over when it returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@dataclass(eq=False)
class _Call:
    """An encoder call on its way. `finite`: of each item, to be asked once `event` is there. `dropped`: wanted no more."""

    items: Items
    rows: Sequence[Tensor]
    finite: Callable[[], Sequence[float]]
    event: Event
    started: float
    dropped: set[str] = field(default_factory=set)


class Encoding:
    """Encoder calls of one device; rows go to the store.

    A call beside other work has a stream of its own: while it runs, steps of those who do not need its rows go on.

    Args:
        event: a new event of the current stream. For tests.
    """

    def __init__(self, store: EncoderStore, device: torch.device, event: Callable[[], Event] | None = None) -> None:
        self.store, self.graphs, self._device = store, EncoderGraphs(device), device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._event: Callable[[], Event] = event or (torch.cuda.Event if cuda else _Done)  # type: ignore[assignment]
        self._calls: list[_Call] = []
        self._results: list[EncodeResult] = []

    def encode(self, model: Model, items: Items) -> tuple[EncodeResult, ...]:
        """Now; an item that breaks the encoder has an error of its own."""
        start = time.perf_counter()
        todo, results = self._load(items)
        for same in _alike(todo):
            results += self._put(same, bisect(same, partial(self._rows, model)), start)
        return tuple(results)

    def begin(self, model: Model, items: Items) -> None:
        """Start to; `arrived` tells what became of each."""
        start = time.perf_counter()
        self.drop([item.hash for item in items])  # an older call's rows of them were dropped
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            todo, results = self._load(items)
            self._results += results
            for same in _alike(todo):
                self._begin(same, bisect(same, partial(self._unchecked, model)), start)

    def arrived(self, model: Model, wait: bool) -> tuple[EncodeResult, ...]:
        """Of what was begun and is done, each once. `wait`: until there is any, if anything was begun."""
        results, self._results = self._results, []
        while self._calls:
            call = self._calls[0]
            if wait and not results:
                call.event.synchronize()
            if not call.event.query():
                break
            del self._calls[0]
            results += self._finish(model, call)
        return tuple(results)

    def drop(self, keys: Iterable[str]) -> None:
        """Rows that are wanted no more, here or on their way."""
        keys = set(keys)
        self.store.drop(keys)
        for call in self._calls:
            call.dropped |= keys

    def clear(self) -> None:
        """Forget all rows, once those that are to be written are, and recorded calls."""
        for call in self._calls:
            call.event.synchronize()
        self._calls, self._results, self.graphs = [], [], EncoderGraphs(self._device)
        self.store.clear()

    def _load(self, items: Items) -> tuple[list[MultiModalFeature], list[EncodeResult]]:
        """Those that have no file, and what became of those that have one."""
        todo = [item for item in items if self.store.load(item.hash, item.range.num_embeds) is None]
        return todo, [EncodeResult(item.hash, "disk") for item in items if item not in todo]

    def _begin(self, items: Items, made: Sequence[Tensor | Exception], start: float) -> None:
        pairs = list(zip(items, made, strict=True))
        self._results += [_failed(item, rows) for item, rows in pairs if isinstance(rows, Exception)]
        good = [(item, rows) for item, rows in pairs if isinstance(rows, Tensor)]
        if good:
            event, finite = self._event(), fetch(torch.stack([is_finite(rows).all() for _, rows in good]))
            event.record()
            self._calls.append(_Call([item for item, _ in good], [rows for _, rows in good], finite, event, start))

    def _finish(self, model: Model, call: _Call) -> list[EncodeResult]:
        """Rows that are not finite are made once more, alone: they may come from another item."""
        made: list[Tensor | Exception] = []
        for item, rows, fine in zip(call.items, call.rows, call.finite(), strict=True):
            again = not fine and item.hash not in call.dropped
            with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
                made.append(bisect([item], partial(self._rows, model))[0] if again else rows)
            if rows.is_cuda:
                rows.record_stream(torch.cuda.current_stream())  # it is read there, and freed by nobody's stream before
        wanted = [(item, rows) for item, rows in zip(call.items, made, strict=True) if item.hash not in call.dropped]
        return self._put([item for item, _ in wanted], [rows for _, rows in wanted], call.started)

    def _put(self, items: Items, made: Sequence[Tensor | Exception], start: float) -> list[EncodeResult]:
        seconds, results = (time.perf_counter() - start) / max(1, len(items)), []
        for item, rows in zip(items, made, strict=True):
            if isinstance(rows, Exception):
                results.append(_failed(item, rows))
            else:
                self.store.put(item.hash, rows, keep=ROWS not in item.kwargs)
                results.append(EncodeResult(item.hash, seconds=seconds))
        return results

    def _rows(self, model: Model, items: Items) -> list[Tensor]:
        found = self._unchecked(model, items)
        if not all(bool(is_finite(rows).all()) for rows in found):
            raise InputError("the encoder made values that are not finite")
        return found

    def _unchecked(self, model: Model, items: Items) -> list[Tensor]:
        """Encoder rows of items that merge: the caller's own, or the encoder's."""
        if ROWS in items[0].kwargs:
            found = [torch.as_tensor(item.kwargs[ROWS].data).to(self._device, self.store.dtype) for item in items]
        else:
            merged, encode = merge([item.kwargs for item in items], self._device), model.embed_multimodal
            modality = items[0].modality
            found = self.graphs(encode, modality, merged) if model.recordable else encode(modality, merged)
        for item, rows in zip(items, found, strict=True):
            if rows.shape[0] != item.range.num_embeds:
                raise InputError(f"the encoder made {rows.shape[0]} rows for {item.range.num_embeds} placeholder tokens")
        return [rows.clone() for rows in found] if len(items) > 1 else found  # a view would keep all of them alive


def is_finite(rows: Tensor) -> Tensor:
    """bool `[n]`: rows without NaN and infinities (a float32 sum of finite half-precision values does not overflow)."""
    return rows.sum(-1, dtype=torch.float32).isfinite()


def _alike(items: Items) -> list[list[MultiModalFeature]]:
    """Those that one call takes."""
    return [[items[i] for i in ids] for ids in group([item.kwargs for item in items], [item.modality for item in items])]


def _failed(item: MultiModalFeature, error: Exception) -> EncodeResult:
    _log.warning("encoding failed", exc_info=error if not isinstance(error, InputError) else None)
    memory = is_out_of_memory(error)
    hint = "send fewer or smaller items at once" if memory else "send another one, this one is refused for a while"
    return EncodeResult(item.hash, "", f"encoding failed: {describe(error)}; {hint}", poison=not memory)
