"""Low-rank adapters (LoRA) that requests choose: each row of a step goes through the products of its own adapter only.

Sources: arXiv 2106.09685, and 2402.09353 for DoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.linear import LinearWeight, linear
from ...kernels.low_rank import LowRankWeights
from ...kernels.low_rank.native import AdapterTable, StepTable
from ...kernels.norm import layer_norm, rms_norm


class LayerChange(Protocol):
    """What one adapter changes in one layer."""

    def apply_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Change `rows` (int64 `[n]`; None: all) of the layer's result `out [rows, ...]` in place. `x`: the layer's input."""


@dataclass(frozen=True, eq=False)
class OutputGain:
    """The change that DoRA makes to outputs of the base layer: `out * gain + shift`, where the shift keeps the bias as it is.

    Args:
        gain, shift: `[outputs]`.
    """

    outputs: slice
    gain: Tensor
    shift: Tensor

    def apply_(self, out: Tensor, rows: Tensor | None) -> None:
        """Change `rows` (None: all) of `out [rows, out]` in place."""
        part = out[:, self.outputs]
        if rows is None:
            part.mul_(self.gain).add_(self.shift)
        else:
            part.index_copy_(0, rows, part.index_select(0, rows).mul_(self.gain).add_(self.shift))


Outputs = slice | Tensor
"""Outputs of a layer: a part of them in order, or their numbers, int64 `[n]`."""


@dataclass(frozen=True, eq=False)
class PackedPairs:
    """The matrices of one adapter for one Linear. The pairs of all shards share the first product.

    Args:
        down: `[ranks of all shards, in]`; None without pairs.
        ups: per shard: its ranks, its outputs, and `[outputs, rank]` with the scale multiplied in.
        gains: of the shards with DoRA.
        replaced: outputs whose weight `[outputs, in]` and bias are the adapter's own.
    """

    down: LinearWeight | None
    ups: Sequence[tuple[slice, slice, LinearWeight]]
    gains: Sequence[OutputGain] = ()
    replaced: Sequence[tuple[Outputs, LinearWeight]] = ()

    def apply_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """See LayerChange: `out [rows, out]`, `x [rows, in]`."""
        x = x if rows is None else x.index_select(0, rows)
        _replace_(self.replaced, out, x, rows)
        for gain in self.gains:
            gain.apply_(out, rows)
        if self.down is None:
            return
        low = linear(x, self.down)
        for ranks, outputs, up in self.ups:
            change = linear(low[:, ranks].contiguous(), up)
            if rows is None:
                out[:, outputs] += change
            else:
                out[:, outputs].index_add_(0, rows, change)


@dataclass(frozen=True, eq=False)
class LowRankChange:
    """What one adapter changes in a Linear whose pairs the C++ kernel multiplies, after `replaced`. See PackedPairs.

    Args:
        weights: the pairs, which `StepTable` adds for all adapters of a step at once.
    """

    weights: LowRankWeights
    replaced: Sequence[tuple[Outputs, LinearWeight]] = ()

    def apply_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Replace outputs, without the pairs."""
        _replace_(self.replaced, out, x if rows is None else x.index_select(0, rows), rows)


@dataclass(frozen=True, eq=False)
class EmbeddingChange:
    """What one adapter changes in a table of embeddings.

    Args:
        table: `[vocab, dim]`, which replaces the base model's; None: that one stays.
        up: `[vocab, rank]`, and down: `[dim, rank]` with the scale multiplied in; None without pairs.
        scale: factor of the table's rows.
        tokens: ids of tokens, int64 `[n]`, ascending, and their rows `[n, dim]`, which replace all others; None without.
    """

    table: Tensor | None
    up: Tensor | None
    down: LinearWeight | None
    scale: float
    tokens: tuple[Tensor, Tensor] | None = None

    def apply_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """See LayerChange: `out [rows, dim]`, `x`: token ids `[rows]`."""
        ids = x if rows is None else x.index_select(0, rows)
        if self.table is not None:
            _put_(out, F.embedding(ids, self.table).mul_(self.scale), rows)
        if self.up is not None and self.down is not None:
            change = linear(F.embedding(ids, self.up), self.down).mul_(self.scale)
            if rows is None:
                out += change
            else:
                out.index_add_(0, rows, change)
        if self.tokens is not None:
            own_ids, own_rows = self.tokens
            index = torch.searchsorted(own_ids, ids).clamp_(max=len(own_ids) - 1)
            is_own = own_ids[index] == ids
            others = out if rows is None else out.index_select(0, rows)
            _put_(out, torch.where(is_own[:, None], own_rows[index].mul_(self.scale), others), rows)


@dataclass(frozen=True, eq=False)
class NormChange:
    """A norm with the adapter's own weight `[dim]`, and bias if it is LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float

    def apply_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """See LayerChange: `out` and `x [rows, ..., dim]`."""
        x = x if rows is None else x.index_select(0, rows)
        if self.bias is None:
            _put_(out, rms_norm(x, self.weight, self.eps, None, self.offset), rows)
        else:
            _put_(out, layer_norm(x, self.weight, self.bias, self.eps, None), rows)


def _replace_(replaced: Sequence[tuple[Outputs, LinearWeight]], out: Tensor, x: Tensor, rows: Tensor | None) -> None:
    """Replace outputs of `out [rows, out]`. `x`: the inputs of `rows` alone."""
    for outputs, weight in replaced:
        values = linear(x, weight)
        if isinstance(outputs, slice):
            _put_(out[:, outputs], values, rows)
        elif rows is None:
            out.index_copy_(1, outputs, values)
        else:
            out[rows[:, None], outputs] = values


def _put_(out: Tensor, values: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        out.copy_(values)
    else:
        out.index_copy_(0, rows, values)


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter as the layers read it.

    Args:
        changes: by the number of the layer, without those that are products of `table` only.
        table: the products of the C++ kernel, of all layers; None: it has none.
    """

    changes: Mapping[int, LayerChange]
    table: AdapterTable | None


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows of a step that use one adapter.

    Args:
        rows: int64 `[n]`; None: all rows of the step.
    """

    rows: Tensor | None
    adapter: PackedAdapter


ENCODER_ROWS = 1024  # rows of an encoder's layer that are changed at a time, so that the memory for it is bounded


class ActiveAdapters:
    """The adapters of the current step, or of the current call of an encoder. Shared by the layers of one part of the model.

    Attributes:
        num_rows: rows of the step. None if the layers have any number of rows, as in encoders: all rows use one adapter.
        products: what the C++ kernel adds.
    """

    def __init__(self) -> None:
        self.groups: Sequence[RowGroup] = ()
        self.num_rows: int | None = None
        self.products = StepTable()

    def set(self, groups: Sequence[RowGroup], num_rows: int | None) -> None:
        self.groups, self.num_rows = groups, num_rows
        self.products.write([(group.rows, group.adapter.table) for group in groups if group.adapter.table is not None])


@dataclass(frozen=True)
class ExpertSlot:
    """The adapters of a mixture's experts, whose layers get other rows than those of the step.

    Args:
        step: of the rows of the step.
        calls: of the layers of experts, which compute the rows of one adapter at a time.
    """

    step: ActiveAdapters
    calls: ActiveAdapters

    def run(self, x: Tensor, scored: Tensor | None, compute: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Return `compute(x, scored)` for all rows, with one call for the rows of each adapter.

        Args:
            x: `[rows, dim]`. scored: another tensor with a value per row, `[rows, ...]` (router inputs, modality ids), or None.
        """
        left, out = torch.ones(len(x), dtype=torch.bool, device=x.device), torch.empty_like(x)
        for group in self.step.groups:
            self.calls.set((RowGroup(None, group.adapter),), None)
            try:
                if group.rows is None:
                    return compute(x, scored)
                out.index_copy_(0, group.rows, compute(*_select(x, scored, group.rows)))
            finally:
                self.calls.set((), None)
            left[group.rows] = False
        rows = left.nonzero().flatten()
        return out.index_copy_(0, rows, compute(*_select(x, scored, rows))) if len(rows) else out


def _select(x: Tensor, scored: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    return x.index_select(0, rows), None if scored is None else scored.index_select(0, rows)


@dataclass(frozen=True)
class AdapterSlot:
    """Applies the adapters of a step to one layer."""

    number: int
    active: ActiveAdapters

    def change_(self, out: Tensor, x: Tensor) -> None:
        """Change the result of a Linear `out [rows, out]` in place, as the adapters of the step say, from `x [rows, in]`."""
        self.apply_(out, x)
        if self.active.products.is_empty:
            return
        if self.active.num_rows is None:
            for some_out, some_x in zip(out.split(ENCODER_ROWS), x.split(ENCODER_ROWS), strict=True):
                self.active.products.add_(some_out, some_x, self.number)
        else:
            assert len(x) == self.active.num_rows, "the rows of an adapted layer are those of the step"
            self.active.products.add_(out, x, self.number)

    def apply_(self, out: Tensor, x: Tensor) -> None:
        """Change the layer's result `out [rows, ...]` in place without products of the kernel. `x`: its input."""
        for group in self.active.groups:
            change = group.adapter.changes.get(self.number)
            if change is None:
                continue
            if self.active.num_rows is None:
                for some_out, some_x in zip(out.split(ENCODER_ROWS), x.split(ENCODER_ROWS), strict=True):
                    change.apply_(some_out, some_x, None)
            else:
                assert len(x) == self.active.num_rows, "the rows of an adapted layer are those of the step"
                change.apply_(out, x, group.rows)
