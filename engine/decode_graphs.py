"""Decode steps that replay a recorded forward: which ones may, and with what inputs. Knows no model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from ..kernels.graph import Graph, Watched, capture
from ..kernels.metadata import AttentionMetadata
from ..models.interface import ForwardBatch

_MOST_ROWS = 64  # with more, finding the way to the kernels takes no time beside them
_MOST_GRAPHS = 4

Forward = Callable[[ForwardBatch], Tensor]
_Key = tuple[object, ...]


class DecodeGraphs:
    """Graphs of decode steps, each of one number of rows: the last few that were used.

    The second step in a row of the same shape is recorded, the third replays it. A forward that cannot be replayed stays as
    it is; so does a step with prompt rows or encoder rows.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[_Key, _Decode | None] = OrderedDict()
        self._last: _Key | None = None

    def __call__(self, forward: Forward, batch: ForwardBatch) -> Tensor:
        """`forward(batch)`, by whatever way. The result may be overwritten by the next call."""
        last, self._last = self._last, _key(forward, batch)
        key = self._last
        if key is None:
            return forward(batch)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            known = self._graphs[key]
            return forward(batch) if known is None else known.replay(batch)
        if key != last:
            return forward(batch)
        result, self._graphs[key] = _record(forward, batch)
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return result


@dataclass(frozen=True, kw_only=True)
class _Lasting(AttentionMetadata):
    """Of many steps: what differs between them stands in tensors that are written anew, `lengths` int64 `[rows]` too."""

    lengths: Tensor

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.query_start), self.lengths


@dataclass(frozen=True, eq=False)
class _Decode:
    """A recorded step and what it reads."""

    graph: Graph
    inputs: ForwardBatch
    groups: tuple[_Lasting, ...]  # each once

    def replay(self, batch: ForwardBatch) -> Tensor:
        _fill(self.inputs, batch, _INPUTS)
        for to, attn in zip(self.groups, _groups(batch), strict=True):
            _fill_group(to, attn)
        return self.graph.replay()


_INPUTS = tuple(f.name for f in fields(ForwardBatch) if f.name not in ("attn", "kv_caches"))
_PARTS = tuple(f.name for f in fields(AttentionMetadata) if f.name not in ("seq_lens", "block_tables"))


def _key(forward: Forward, batch: ForwardBatch) -> _Key | None:
    """What a graph depends on: all there is but the numbers in tensors, and lengths. None for a step that has none."""
    rows, groups = len(batch.input_ids), _groups(batch)
    if rows > _MOST_ROWS or batch.input_ids.device.type != "cpu":
        return None
    if batch.embed_index is not None or batch.cross_rows is not None:
        return None
    if not all(len(attn.seq_lens) == rows for attn in groups):
        return None
    parts = [(_width(attn), *_fixed(attn, _PARTS)) for attn in groups]
    return forward, id(batch.kv_caches), torch.get_num_threads(), *_fixed(batch, _INPUTS), *parts


def _fixed(part: ForwardBatch | AttentionMetadata, names: Sequence[str]) -> list[object]:
    values = [getattr(part, name) for name in names]
    return [value.shape if isinstance(value, Tensor) else value for value in values]


def _groups(batch: ForwardBatch) -> Sequence[AttentionMetadata]:
    return tuple({id(attn): attn for attn in batch.attn}.values())


def _width(attn: AttentionMetadata) -> int:
    """Of the block tables that are read: the next power of two, so that growing sequences seldom change it."""
    return 1 << (attn.block_tables.shape[1] - 1).bit_length()


def _record(forward: Forward, batch: ForwardBatch) -> tuple[Tensor, _Decode | None]:
    groups = {id(attn): _lasting(attn) for attn in batch.attn}
    inputs = replace(batch, attn=[groups[id(attn)] for attn in batch.attn], **_copies(batch, _INPUTS))
    watched = [cast(Watched, attn.seq_lens) for attn in groups.values()]
    result, graph = capture(partial(forward, inputs), watched)
    return result, None if graph is None else _Decode(graph, inputs, tuple(groups.values()))


def _lasting(attn: AttentionMetadata) -> _Lasting:
    rows = len(attn.seq_lens)
    made = _Lasting(
        seq_lens=cast(tuple[int, ...], Watched(attn.seq_lens)),
        block_tables=attn.block_tables.new_zeros(rows, _width(attn)),
        lengths=torch.empty(rows, dtype=torch.int64),
        **_copies(attn, _PARTS),
    )
    _fill_group(made, attn)
    return made


def _copies(part: ForwardBatch | AttentionMetadata, names: Sequence[str]) -> dict[str, Any]:
    """Of its tensors; the rest is the same in every step of the key."""
    values = {name: getattr(part, name) for name in names}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def _fill(to: object, part: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor):
            getattr(to, name).copy_(value)


def _fill_group(to: _Lasting, attn: AttentionMetadata) -> None:
    """Table entries beyond those of this step are not read."""
    _fill(to, attn, _PARTS)
    to.block_tables[:, : attn.block_tables.shape[1]].copy_(attn.block_tables)
    to.lengths.copy_(attn.bounds[1])
