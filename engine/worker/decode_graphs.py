"""Decode steps that replay a recorded forward: which ones may, and with what inputs. Knows no model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.dispatch import interpreted
from ..kernels.graph import NotRecorded, Recorded, Watched, capture, capture_cuda, capture_pool
from ..kernels.metadata import AttentionMetadata
from ..models.interface import ForwardBatch, Model, Work

Forward = Callable[[ForwardBatch], Tensor]
_Key = tuple[object, ...]
_Run = tuple[Tensor, Recorded[Tensor] | None]
_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))  # of steps on a GPU
_MOST_GRAPHS = 64  # likewise
_NUMBERS = 128  # bytes of a row's token, positions, slots and length


@dataclass(frozen=True)
class _Kind:
    """How a device records.

    Args:
        sizes: numbers of rows that a step is filled up to with rows that nobody wants; None: every number has its own graph.
        most_rows: of a step; with more, finding the way to the kernels takes no time beside them.
        most_graphs: that are kept.
        record: a forward that runs on these inputs again and again, its result, and what replays it.
    """

    sizes: Sequence[int] | None
    most_rows: int
    most_graphs: int
    record: Callable[[Callable[[], Tensor], Sequence[AttentionMetadata]], _Run]


def _record_on_cpu(forward: Callable[[], Tensor], groups: Sequence[AttentionMetadata]) -> _Run:
    return capture(forward, [cast(Watched, attn.seq_lens) for attn in groups])


def _kind(device: torch.device) -> _Kind:
    if device.type == "cpu":
        return _Kind(None, 64, 4, _record_on_cpu)
    pool = capture_pool(device)
    return _Kind(_SIZES, _SIZES[-1], _MOST_GRAPHS, lambda forward, _: capture_cuda(forward, pool))


def graph_bytes(model: Model, seqs: int, groups: int, blocks: int, work: Work) -> int:
    """At most so many bytes stay with the graphs of a GPU: each has its inputs and its result, what lies between is shared.

    Args:
        seqs: in a step at most.
        groups: of caches, each with tables of its own.
        blocks: of the longest sequence.
    """
    if work.device.type == "cpu":
        return 0
    sizes = [size for size, less in zip(_SIZES, (0, *_SIZES), strict=False) if less < seqs]
    widths = [1 << power for power in range((blocks - 1).bit_length() + 1)]
    row = model.hidden_size * model.cache_specs[0].dtype.itemsize + _NUMBERS
    own: list[int] = sorted((size * (4 * groups * width + row) for size in sizes for width in widths), reverse=True)
    return sum(own[:_MOST_GRAPHS]) + model.forward_bytes(replace(work, rows=min(work.rows, sizes[-1])))


class DecodeGraphs:
    """Graphs of decode steps, each of one number of rows: the last few that were used.

    The second step in a row of the same shape is recorded, the third replays it. A forward that cannot be replayed stays as
    it is; so does a step with prompt rows or encoder rows.
    """

    def __init__(self, device: torch.device, kind: _Kind | None = None) -> None:
        self._kind = kind or _kind(device)
        self._graphs: OrderedDict[_Key, _Decode | None] = OrderedDict()
        self._last: _Key | None = None

    def __call__(self, forward: Forward, batch: ForwardBatch) -> Tensor:
        """`forward(batch)`, by whatever way. The result may be overwritten by the next call."""
        last, self._last = self._last, self._key(forward, batch)
        key = self._last
        if key is None:
            return forward(batch)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            known = self._graphs[key]
            return forward(batch) if known is None else known.replay(batch)
        if key != last:
            return forward(batch)
        result, self._graphs[key] = self._record(forward, batch)
        if len(self._graphs) > self._kind.most_graphs:
            self._graphs.popitem(last=False)
        return result

    def _key(self, forward: Forward, batch: ForwardBatch) -> _Key | None:
        """What a graph depends on: all there is but the numbers in tensors, and lengths. None for a step that has none."""
        rows, groups = len(batch.input_ids), _groups(batch)
        if rows > self._kind.most_rows or batch.embed_index is not None or batch.cross_rows is not None or interpreted():
            return None
        if not all(len(attn.seq_lens) == rows for attn in groups):
            return None
        size = self._size(rows)
        parts = [(_width(attn), *_fixed(attn, _PARTS, rows, size)) for attn in groups]
        return forward, id(batch.kv_caches), torch.get_num_threads(), *_fixed(batch, _INPUTS, rows, size), *parts

    def _size(self, rows: int) -> int:
        """Rows that are computed for so many."""
        return rows if self._kind.sizes is None else next(size for size in self._kind.sizes if size >= rows)

    def _record(self, forward: Forward, batch: ForwardBatch) -> tuple[Tensor, _Decode | None]:
        rows, size = len(batch.input_ids), self._size(len(batch.input_ids))
        groups = {id(attn): _lasting(attn, size, watched=self._kind.sizes is None) for attn in batch.attn}
        inputs = replace(batch, attn=[groups[id(attn)] for attn in batch.attn], **_copies(batch, _INPUTS, rows, size))
        made = tuple(groups.values())
        for to, attn in zip(made, _groups(batch), strict=True):
            _fill_group(to, attn)
        try:
            result, graph = self._kind.record(partial(forward, inputs), made)
        except NotRecorded as failed:
            result, graph = failed.result, None
        return result[:rows], None if graph is None else _Decode(graph, inputs, made)


@dataclass(frozen=True, kw_only=True)
class _Lasting(AttentionMetadata):
    """Of many steps: what differs between them stands in tensors that are written anew, `lengths` int64 `[rows]` too."""

    lengths: Tensor

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.query_start), self.lengths

    @cached_property
    def device_bounds(self) -> tuple[Tensor, Tensor]:
        return self.on_device(torch.tensor(self.query_start, dtype=torch.int32)), self.lengths


@dataclass(frozen=True, eq=False)
class _Decode:
    """A recorded step and what it reads."""

    graph: Recorded[Tensor]
    inputs: ForwardBatch
    groups: tuple[_Lasting, ...]  # each once

    def replay(self, batch: ForwardBatch) -> Tensor:
        _fill(self.inputs, batch, _INPUTS)
        for to, attn in zip(self.groups, _groups(batch), strict=True):
            _fill_group(to, attn)
        return self.graph.replay()[: len(batch.input_ids)]


_INPUTS = tuple(f.name for f in fields(ForwardBatch) if f.name not in ("attn", "kv_caches"))
_PARTS = tuple(f.name for f in fields(AttentionMetadata) if f.name not in ("query_start", "seq_lens", "block_tables"))


def _fixed(part: ForwardBatch | AttentionMetadata, names: Sequence[str], rows: int, size: int) -> list[object]:
    """Shapes once filled up, and what is no tensor."""
    values = [getattr(part, name) for name in names]
    return [_filled(value.shape, rows, size) if isinstance(value, Tensor) else value for value in values]


def _filled(shape: Sequence[int], rows: int, size: int) -> tuple[int, ...]:
    """The last axis of a tensor is the step's rows, except where they write no keys (cross-attention)."""
    return (*shape[:-1], size) if shape[-1] == rows else tuple(shape)


def _groups(batch: ForwardBatch) -> Sequence[AttentionMetadata]:
    return tuple({id(attn): attn for attn in batch.attn}.values())


def _width(attn: AttentionMetadata) -> int:
    """Of the block tables that are read: the next power of two, so that growing sequences seldom change it."""
    return 1 << (attn.block_tables.shape[1] - 1).bit_length()


def _lasting(attn: AttentionMetadata, size: int, watched: bool) -> _Lasting:
    """`watched`: whoever looks at lengths in Python is noticed; else they are the longest that the tables have room for."""
    width, rows = _width(attn), len(attn.seq_lens)
    lengths = Watched(attn.seq_lens) if watched else (width * attn.block_size,) * size
    kept = torch.int64 if attn.block_tables.device.type == "cpu" and watched else torch.int32
    return _Lasting(
        query_start=tuple(range(size + 1)),
        seq_lens=cast(tuple[int, ...], lengths),
        block_tables=attn.block_tables.new_zeros(size, width),
        lengths=torch.zeros(size, dtype=kept, device=attn.block_tables.device),
        **_copies(attn, _PARTS, rows, size),
    )


def _copies(part: ForwardBatch | AttentionMetadata, names: Sequence[str], rows: int, size: int) -> dict[str, Any]:
    """Of its tensors, filled up; the rest is the same in every step of the key."""
    values = {name: getattr(part, name) for name in names}
    return {name: _padded(value, name, rows, size) if isinstance(value, Tensor) else value for name, value in values.items()}


def _padded(value: Tensor, name: str, rows: int, size: int) -> Tensor:
    """A copy with rows that nobody wants behind the others: the first token at the first place, written nowhere."""
    more = _filled(value.shape, rows, size)[-1] - value.shape[-1]
    return F.pad(value, (0, more), value=_NOWHERE.get(name, 0)).clone()


_NOWHERE = {"slot_mapping": -1}


def _fill(to: object, part: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor):
            _write(getattr(to, name), value, _NOWHERE.get(name, 0))


def _write(to: Tensor, value: Tensor, rest: int) -> None:
    """The first numbers of the last axis, and what stands behind them."""
    rows = value.shape[-1]
    to[..., :rows].copy_(value)
    if rows < to.shape[-1]:
        to[..., rows:].fill_(rest)


def _fill_group(to: _Lasting, attn: AttentionMetadata) -> None:
    """Table entries beyond those of this step are not read."""
    _fill(to, attn, _PARTS)
    rows, width = attn.block_tables.shape
    to.block_tables[:rows, :width].copy_(attn.block_tables)
    _write(to.lengths, attn.bounds[1] if to.lengths.dtype == torch.int64 else attn.device_bounds[1], 0)
