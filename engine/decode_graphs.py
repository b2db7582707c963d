"""Decode steps that replay a recorded forward: which ones may, and with what inputs. Knows no model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from ..kernels.graph import Graph, Watched, capture
from ..kernels.metadata import AttentionMetadata
from ..models.interface import ForwardBatch

_MOST_ROWS = 64  # with more, finding the way to the kernels takes no time beside them
_MOST_GRAPHS = 4

Forward = Callable[[ForwardBatch], Tensor]
_Key = tuple[Forward, tuple[int, ...], tuple[int, ...], int]


class DecodeGraphs:
    """Graphs of decode steps, each of one number of rows: the last few that were used.

    The second step in a row of the same shape is recorded, the third replays it. A forward that cannot be replayed stays as
    it is; so does a step with prompt rows, encoder rows or cross-attention.
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
        self.inputs.input_ids.copy_(batch.input_ids)
        self.inputs.positions.copy_(batch.positions)
        for to, attn in zip(self.groups, _groups(batch), strict=True):
            _fill(to, attn)
        return self.graph.replay()


def _key(forward: Forward, batch: ForwardBatch) -> _Key | None:
    """What a graph depends on; None for a step that has none."""
    rows, groups = len(batch.input_ids), _groups(batch)
    if rows > _MOST_ROWS or batch.input_ids.device.type != "cpu":
        return None
    if batch.embed_index is not None or batch.cross_rows is not None:
        return None
    if not all(attn.causal and len(attn.seq_lens) == rows for attn in groups):
        return None
    return forward, batch.positions.shape, tuple(_width(attn) for attn in groups), torch.get_num_threads()


def _groups(batch: ForwardBatch) -> Sequence[AttentionMetadata]:
    return tuple({id(attn): attn for attn in batch.attn}.values())


def _width(attn: AttentionMetadata) -> int:
    """Of the block tables that are read: the next power of two, so that growing sequences seldom change it."""
    return 1 << (attn.block_tables.shape[1] - 1).bit_length()


def _record(forward: Forward, batch: ForwardBatch) -> tuple[Tensor, _Decode | None]:
    groups = {id(attn): _lasting(attn) for attn in batch.attn}
    inputs = replace(
        batch,
        input_ids=batch.input_ids.clone(),
        positions=batch.positions.clone(),
        attn=[groups[id(attn)] for attn in batch.attn],
    )
    watched = [cast(Watched, attn.seq_lens) for attn in groups.values()]
    result, graph = capture(partial(forward, inputs), watched)
    return result, None if graph is None else _Decode(graph, inputs, tuple(groups.values()))


def _lasting(attn: AttentionMetadata) -> _Lasting:
    rows = len(attn.seq_lens)
    made = _Lasting(
        query_start=attn.query_start,
        seq_lens=cast(tuple[int, ...], Watched(attn.seq_lens)),
        block_tables=attn.block_tables.new_zeros(rows, _width(attn)),
        slot_mapping=attn.slot_mapping.clone(),
        block_size=attn.block_size,
        invariant=attn.invariant,
        lengths=torch.empty(rows, dtype=torch.int64),
    )
    _fill(made, attn)
    return made


def _fill(to: _Lasting, attn: AttentionMetadata) -> None:
    """Table entries beyond those of this step are not read."""
    to.block_tables[:, : attn.block_tables.shape[1]].copy_(attn.block_tables)
    to.slot_mapping.copy_(attn.slot_mapping)
    to.lengths.copy_(attn.bounds[1])
