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
from . import staging
from .encoder_graphs import EncoderGraphs
from .encoder_store import EncoderStore
from .failures import describe
from .quarantine import bisect, is_out_of_memory
from .types import EncodeResult

Items = Sequence[MultiModalFeature]
_MOMENT, _LOOK = 0.005, 0.0002  # seconds: to wait for rows in one step, and between two looks
_log = logging.getLogger(__name__)


class Event(staging.Event, Protocol):
    """With a look at whether it is there."""

    def query(self) -> bool: ...


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
    rows: Sequence[Tensor | Exception]
    finite: Callable[[], Sequence[float]]
    event: Event
    started: float
    dropped: set[str] = field(default_factory=set)


class Encoding:
    """Encoder calls of one device; rows go to the store.

    A call beside other work has a stream of its own: while it runs, steps of those who do not need its rows go on. There is
    one at a time: what the host copies for the next would wait for it, and the host with it.

    Args:
        event: a new event of the current stream. moment: seconds that `arrived` waits at most. For tests.
    """

    def __init__(
        self, store: EncoderStore, device: torch.device, event: Callable[[], Event] | None = None, moment: float = _MOMENT
    ) -> None:
        self.store, self.graphs, self._device = store, EncoderGraphs(device), device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._event: Callable[[], Event] = event or (torch.cuda.Event if cuda else _Done)  # type: ignore[assignment]
        self._moment = moment
        self._queue: list[list[MultiModalFeature]] = []  # calls that are not begun
        self._call: _Call | None = None
        self._results: list[EncodeResult] = []

    def encode(self, model: Model, items: Items) -> tuple[EncodeResult, ...]:
        """Now; an item that breaks the encoder has an error of its own."""
        todo, results = self._load(items)
        for same in _alike(todo):
            start = time.perf_counter()
            results += self._put(same, bisect(same, partial(self._rows, model)), start)
        return tuple(results)

    def begin(self, model: Model, items: Items) -> None:
        """Start to; `arrived` tells what became of each."""
        self.drop([item.hash for item in items])  # an older call's rows of them were dropped
        try:
            todo, results = self._load(items)
        except Exception as error:
            todo, results = [], [_failed(item, error) for item in items]
        self._results += results
        self._queue += _alike(todo)
        self._start(model)

    def arrived(self, model: Model, wait: bool) -> tuple[EncodeResult, ...]:
        """Of what was begun and is done, each once; "dropped" where its rows are not wanted any more.

        `wait`: a moment until there is any, if anything was begun; whoever calls has other ears to keep open.
        """
        results, self._results = self._results, []
        end = time.perf_counter() + self._moment
        while (call := self._call) is not None:
            try:
                while not (there := call.event.query()) and wait and not results and time.perf_counter() < end:
                    time.sleep(_LOOK)
                if not there:
                    break
                results += self._finish(model, call)
            except Exception as error:  # of the device, for which the call may be over or not
                results += [_failed(item, error) for item in call.items if item.hash not in call.dropped]
            self._call = None
            self._start(model)
        return tuple(results)

    def drop(self, keys: Iterable[str]) -> None:
        """Rows that are wanted no more, here or on their way."""
        keys = set(keys)
        self.store.drop(keys)
        self._queue = [left for call in self._queue if (left := [item for item in call if item.hash not in keys])]
        if self._call is not None:
            self._call.dropped |= keys

    def clear(self) -> None:
        """Forget all rows, once those that are to be written are, and recorded calls."""
        if self._call is not None:
            self._call.event.synchronize()
        self._queue, self._call, self._results, self.graphs = [], None, [], EncoderGraphs(self._device)
        self.store.clear()

    def _load(self, items: Items) -> tuple[list[MultiModalFeature], list[EncodeResult]]:
        """Those that have no file, and what became of those that have one."""
        todo = [item for item in items if self.store.load(item.hash, item.range.num_embeds) is None]
        return todo, [EncodeResult(item.hash, "disk") for item in items if item not in todo]

    def _start(self, model: Model) -> None:
        """The next call, if there is one and none is on its way."""
        while self._queue and self._call is None:
            items, start = self._queue.pop(0), time.perf_counter()
            try:
                with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
                    made = bisect(items, partial(self._unchecked, model))
                    good = [is_finite(rows).all() for rows in made if isinstance(rows, Tensor)]
                    if good:
                        event, finite = self._event(), staging.fetch(torch.stack(good))
                        event.record()
                        self._call = _Call(items, made, finite, event, start)
                    else:
                        self._results += self._put(items, made, start)
            except Exception as error:
                self._results += [_failed(item, error) for item in items]

    def _finish(self, model: Model, call: _Call) -> list[EncodeResult]:
        """Rows that are not finite are made once more, alone: they may come from another item."""
        fine, made = iter(call.finite()), list(call.rows)
        again = [i for i, rows in enumerate(made) if isinstance(rows, Tensor) and not next(fine)]
        for i in [i for i in again if call.items[i].hash not in call.dropped]:
            with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
                made[i] = bisect([call.items[i]], partial(self._rows, model))[0]
        pairs = list(zip(call.items, made, strict=True))
        wanted = [(item, rows) for item, rows in pairs if item.hash not in call.dropped]
        gone = [EncodeResult(item.hash, "dropped") for item, _ in pairs if item.hash in call.dropped]
        return gone + self._put([item for item, _ in wanted], [rows for _, rows in wanted], call.started)

    def _put(self, items: Items, made: Sequence[Tensor | Exception], start: float) -> list[EncodeResult]:
        seconds, results = (time.perf_counter() - start) / max(1, len(items)), []
        for item, rows in zip(items, made, strict=True):
            if isinstance(rows, Exception):
                results.append(_failed(item, rows))
                continue
            if rows.is_cuda:
                rows.record_stream(torch.cuda.current_stream())  # where they are read: nobody writes there before that is done
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
