"""Runs encoders: groups items into calls, runs them at once or beside decoder steps, and stores their rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callers.errors import ErrorCode, ErrorInfo, InputError, is_out_of_memory
from ...kernels.streams import Event, copy_to_host, new_event
from ...mm.embeddings import ROWS
from ...mm.fields import group_mergeable, merge
from ...mm.types import MultiModalFeature
from ...models.interface import Model
from ...models.layers.ranks import Ranks
from ..errors import error_text
from ..types import EncodeResult
from .encoder_graphs import EncoderGraphs
from .encoder_ranks import any_rank, assign_ranks, encoder_cost, gather_rows
from .encoder_store import EncoderStore
from .isolate import isolate_failures

if TYPE_CHECKING:
    from ...models.layers.row_adapter import PackedAdapter
    from .adapter_store import AdapterStore

Items = Sequence[MultiModalFeature]
_POLL_SECONDS = 0.005  # `poll` waits for a result no longer than that, since its caller also reads a command queue
_POLL_INTERVAL = 0.0002  # seconds between two looks at an event
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _EncoderCall:
    """Items that one encoder call takes.

    Args:
        adapter: what changes the encoder for all of them, held until the call ends; None: nothing.
    """

    items: list[MultiModalFeature]
    adapter: PackedAdapter | None


@dataclass(eq=False)
class _InflightCall:
    """A launched encoder call.

    Args:
        rows: encoder rows of each item, or why it has none.
        finite: returns whether each item's rows are finite; to be called once `event` is done.
        started: `time.perf_counter()` when it was launched.
        discarded: hashes of items whose rows are no longer needed.
    """

    call: _EncoderCall
    rows: Sequence[Tensor | Exception]
    finite: Callable[[], Sequence[float]]
    event: Event
    started: float
    discarded: set[str] = field(default_factory=set)


class EncoderRunner:
    """Encodes items on one device, by `encode` at once, or by `submit` and `poll` beside decoder steps. Rows go to the store.

    Submitted calls run on a separate stream, so that sequences which do not need their rows go on. Only one runs at a time:
    the input of a second call would be copied only after the first call, and the host would wait for that copy.

    Args:
        event: makes an event of the current stream. poll_seconds: how long `poll` may wait. For tests.
        adapters: those that requests may choose.
        ranks: the ranks that `encode` divides items among; None: each process encodes all items.
    """

    def __init__(
        self,
        store: EncoderStore,
        device: torch.device,
        event: Callable[[], Event] | None = None,
        poll_seconds: float = _POLL_SECONDS,
        adapters: AdapterStore | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.store, self.graphs, self._device = store, EncoderGraphs(device), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event = event or partial(new_event, device)
        self._poll_seconds, self._adapters, self._ranks = poll_seconds, adapters, ranks
        self._queue: list[_EncoderCall] = []  # calls that wait to be launched
        self._inflight: _InflightCall | None = None
        self._results: list[EncodeResult] = []

    def encode(self, model: Model, items: Items) -> tuple[EncodeResult, ...]:
        """Encode items and store their rows. An item that makes the encoder fail gets an error; the others are encoded."""
        missing, results = self._load_stored(items)
        if self._ranks is not None:
            is_missing = any_rank(self._ranks, [item in missing for item in items])  # others may have read it from disk
            needed = [item for item, is_needed in zip(items, is_missing, strict=True) if is_needed]
            results = [result for result in results if result.hash not in {item.hash for item in needed}]
            encoded, missing = self._encode_divided(model, self._ranks, needed)
            results += encoded
        for call in self._group_items(missing):
            start = time.perf_counter()
            results += self._store_rows(call.items, self._encode_call(model, call), start)
        return tuple(results)

    def _encode_call(self, model: Model, call: _EncoderCall) -> list[Tensor | Exception]:
        return isolate_failures(call.items, partial(self._encode_finite, model, call.adapter))

    def _encode_divided(self, model: Model, ranks: Ranks, items: Items) -> tuple[list[EncodeResult], list[MultiModalFeature]]:
        """Encode this rank's items, and store the rows of those of all ranks.

        Chunks of live streams and rows that callers give are left to each rank, since streams have states. So are items that
        a rank could not encode, so that each rank has the same error.

        Returns:
            The results, and the items that are left.
        """
        start, divided = time.perf_counter(), [item for item in items if item.stream is None and ROWS not in item.kwargs]
        owners = assign_ranks([encoder_cost(item) for item in divided], ranks.size)
        mine = [item for item, owner in zip(divided, owners, strict=True) if owner == ranks.rank]
        encoded = dict[str, Tensor]()
        for call in self._group_items(mine):
            made = zip(call.items, self._encode_call(model, call), strict=True)
            encoded |= {item.hash: rows for item, rows in made if isinstance(rows, Tensor) and self.store.fits(rows)}
        failed = any_rank(ranks, [item in mine and item.hash not in encoded for item in divided])
        done = [(item, owner) for item, owner, has_failed in zip(divided, owners, failed, strict=True) if not has_failed]
        kept, counts = [owner for _, owner in done], [item.range.num_embeds for item, _ in done]
        own = [encoded[item.hash] for item, owner in done if owner == ranks.rank]
        rows = gather_rows(ranks, kept, counts, own, self.store.width, self.store.dtype) if done else []
        hashes = {item.hash for item, _ in done}
        return self._store_rows([item for item, _ in done], rows, start), [item for item in items if item.hash not in hashes]

    def submit(self, model: Model, items: Items) -> None:
        """Queue items to be encoded; `poll` returns their results."""
        self.discard([item.hash for item in items])  # an earlier call may still compute rows that were discarded
        try:
            missing, results = self._load_stored(items)
        except Exception as error:
            missing, results = [], [_failed(item, error) for item in items]
        self._results += results
        self._queue += self._group_items(missing)
        self._launch_next(model)

    def poll(self, model: Model, wait: bool) -> tuple[EncodeResult, ...]:
        """Return the results of submitted items that are done, each once; "dropped" for items that were discarded.

        Args:
            wait: wait briefly for the first result, if a call is running.
        """
        results, self._results = self._results, []
        end = time.perf_counter() + self._poll_seconds
        while (call := self._inflight) is not None:
            try:
                while not (done := call.event.query()) and wait and not results and time.perf_counter() < end:
                    time.sleep(_POLL_INTERVAL)
                if not done:
                    break
                results += self._finish(model, call)
            except Exception as error:  # the device failed: even a call that is done cannot be trusted
                results += [_failed(item, error) for item in call.call.items if item.hash not in call.discarded]
            self._inflight = None
            self._launch_next(model)
        return tuple(results)

    def discard(self, hashes: Iterable[str]) -> None:
        """Drop rows that are no longer needed, stored or still being computed."""
        hashes = set(hashes)
        self.store.drop(hashes)
        left = (replace(call, items=[item for item in call.items if item.hash not in hashes]) for call in self._queue)
        self._queue = [call for call in left if call.items]
        if self._inflight is not None:
            self._inflight.discarded |= hashes

    def clear(self) -> None:
        """Drop all rows, once pending writes to disk are done, and all recorded calls."""
        if self._inflight is not None:
            self._inflight.event.synchronize()
        self._queue, self._inflight, self._results, self.graphs = [], None, [], EncoderGraphs(self._device)
        self.store.clear()

    def _load_stored(self, items: Items) -> tuple[list[MultiModalFeature], list[EncodeResult]]:
        """Load rows from disk. Return the items that are not there, and the results of the others."""
        missing = [
            item for item in items if item.stream is not None or self.store.load(item.hash, item.range.num_embeds) is None
        ]
        return missing, [EncodeResult(item.hash, "disk") for item in items if item not in missing]

    def _launch_next(self, model: Model) -> None:
        """Launch the next queued call unless one is running."""
        while self._queue and self._inflight is None:
            call, start = self._queue.pop(0), time.perf_counter()
            items = call.items
            try:
                with torch.cuda.stream(self._stream):
                    rows = isolate_failures(items, partial(self._embed, model, call.adapter))
                    finite = [is_finite(item_rows).all() for item_rows in rows if isinstance(item_rows, Tensor)]
                    if finite:
                        event, read_finite = self._event(), copy_to_host(torch.stack(finite))
                        event.record()
                        self._inflight = _InflightCall(call, rows, read_finite, event, start)
                    else:
                        self._results += self._store_rows(items, rows, start)
            except Exception as error:
                self._results += [_failed(item, error) for item in items]

    def _finish(self, model: Model, call: _InflightCall) -> list[EncodeResult]:
        """Store the rows of a call that is done. Items whose rows are not finite are encoded again, one by one."""
        finite, rows, items = iter(call.finite()), list(call.rows), call.call.items
        encode = partial(self._encode_finite, model, call.call.adapter)
        not_finite = [i for i, item_rows in enumerate(rows) if isinstance(item_rows, Tensor) and not next(finite)]
        for i in [i for i in not_finite if items[i].hash not in call.discarded]:
            with torch.cuda.stream(self._stream):
                rows[i] = isolate_failures([items[i]], encode)[0]
        pairs = list(zip(items, rows, strict=True))
        needed = [(item, item_rows) for item, item_rows in pairs if item.hash not in call.discarded]
        dropped = [EncodeResult(item.hash, "dropped") for item, _ in pairs if item.hash in call.discarded]
        return dropped + self._store_rows([item for item, _ in needed], [item_rows for _, item_rows in needed], call.started)

    def _store_rows(self, items: Items, rows: Sequence[Tensor | Exception], start: float) -> list[EncodeResult]:
        """Store each item's rows, and return its result with its share of the seconds since `start`."""
        seconds, results = (time.perf_counter() - start) / max(1, len(items)), []
        for item, item_rows in zip(items, rows, strict=True):
            if isinstance(item_rows, Exception):
                results.append(_failed(item, item_rows))
                continue
            if item_rows.is_cuda:
                item_rows.record_stream(torch.cuda.current_stream())  # its memory stays until this stream has read it
            self.store.put(item.hash, item_rows, write=ROWS not in item.kwargs and item.stream is None)
            results.append(EncodeResult(item.hash, seconds=seconds))
        return results

    def _encode_finite(self, model: Model, adapter: PackedAdapter | None, items: Items) -> list[Tensor]:
        """Encode items as `_embed` does. Raise InputError if a value is not finite."""
        rows = self._embed(model, adapter, items)
        if not all(bool(is_finite(item_rows).all()) for item_rows in rows):
            raise InputError("the encoder returned values that are not finite", code="not_finite")
        return rows

    def _embed(self, model: Model, adapter: PackedAdapter | None, items: Items) -> list[Tensor]:
        """Return the encoder rows of each item: the caller's own, or those of one encoder call."""
        if ROWS in items[0].kwargs:
            rows = [torch.as_tensor(item.kwargs[ROWS].data).to(self._device, self.store.dtype) for item in items]
        else:
            tensors, encode = merge([item.kwargs for item in items], self._device), model.embed_multimodal
            modality = items[0].modality
            is_recordable = model.recordable and adapter is None and items[0].stream is None  # it keeps tensors of streams
            with nullcontext() if adapter is None else _applied(model, adapter):
                rows = self.graphs(encode, modality, tensors) if is_recordable else encode(modality, tensors)
        for item, made in zip(items, rows, strict=True):
            if made.shape[0] != item.range.num_embeds:
                raise InputError(f"the encoder returned {made.shape[0]} rows for {item.range.num_embeds} placeholder tokens")
        return [made.clone() for made in rows] if len(items) > 1 else rows  # a view would keep the rows of all items alive

    def _group_items(self, items: Items) -> list[_EncoderCall]:
        """Group the items that one encoder call can take."""
        by_adapter = dict[str, list[MultiModalFeature]]()
        for item in items:
            by_adapter.setdefault(item.adapter, []).append(item)
        calls = []
        for name, own in by_adapter.items():
            adapter = self._adapters.of_encoder(name) if name and self._adapters is not None else None
            groups = group_mergeable([item.kwargs for item in own], [item.modality for item in own])
            calls += [_EncoderCall([own[i] for i in ids], adapter) for ids in groups]
        return calls


def _applied(model: Model, adapter: PackedAdapter) -> AbstractContextManager[None]:
    """Apply an adapter to the model's encoders inside the context."""
    from ...models.layers.row_adapter import RowGroup
    from .adapter_store import layers_of

    return layers_of(model).applied("encoder", (RowGroup(None, adapter),), None)


def is_finite(rows: Tensor) -> Tensor:
    """Return bool `[n]`: rows without NaN and infinity. A float32 sum of finite half-precision values does not overflow."""
    return rows.sum(-1, dtype=torch.float32).isfinite()


def _failed(item: MultiModalFeature, error: Exception) -> EncodeResult:
    _log.warning("encoding failed", exc_info=error if not isinstance(error, InputError) else None)
    memory = is_out_of_memory(error)
    hint = "send fewer or smaller items at once" if memory else "send another item; this one is refused for a while"
    code: ErrorCode = "out_of_memory" if memory else "encoder_failed"
    return EncodeResult(item.hash, "", ErrorInfo(code, f"encoding failed: {error_text(error)}; {hint}"), item_failed=not memory)
