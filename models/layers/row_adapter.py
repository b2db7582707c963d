"""Low-rank adapters (LoRA) that requests choose: each row of a step goes through the products of its own adapter only.

Source: arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.linear import LinearWeight, linear


@dataclass(frozen=True, eq=False)
class PackedPairs:
    """The matrices of one adapter for one Linear. The pairs of all shards share the first product.

    Args:
        down: `[ranks of all shards, in]`.
        ups: per shard: its ranks, its outputs, and `[outputs, rank]` with the scale multiplied in.
    """

    down: LinearWeight
    ups: Sequence[tuple[slice, slice, LinearWeight]]

    def add_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add to `rows` (int64 `[n]`; None: all rows) of `out [rows, out]` in place, from `x [rows, in]`."""
        low = linear(x if rows is None else x.index_select(0, rows), self.down)
        for ranks, outputs, up in self.ups:
            change = linear(low[:, ranks].contiguous(), up)
            if rows is None:
                out[:, outputs] += change
            else:
                out[:, outputs].index_add_(0, rows, change)


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows of a step that use one adapter.

    Args:
        rows: int64 `[n]`; None: all rows of the step.
        pairs: by the number of the Linear.
    """

    rows: Tensor | None
    pairs: Mapping[int, PackedPairs]


class ActiveAdapters:
    """The adapters of the current step. Shared by all layers of a model; set around each forward."""

    def __init__(self) -> None:
        self.groups: Sequence[RowGroup] = ()
        self.num_rows = 0


@dataclass(frozen=True)
class AdapterSlot:
    """The place of one Linear in a model whose requests choose adapters."""

    number: int
    active: ActiveAdapters

    def add_(self, out: Tensor, x: Tensor) -> None:
        """Add the adapters of the step to `out [rows, out]` in place."""
        for group in self.active.groups:
            pairs = group.pairs.get(self.number)
            if pairs is not None:
                assert len(x) == self.active.num_rows, "the rows of an adapted layer are those of the step"
                pairs.add_(out, x, group.rows)
