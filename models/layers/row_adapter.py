"""Low-rank adapters (LoRA) that requests choose: each row of a step goes through the products of its own adapter only.

Sources: arXiv 2106.09685, and 2402.09353 for DoRA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.linear import LinearWeight, linear


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


@dataclass(frozen=True, eq=False)
class PackedPairs:
    """The matrices of one adapter for one Linear. The pairs of all shards share the first product.

    Args:
        down: `[ranks of all shards, in]`.
        ups: per shard: its ranks, its outputs, and `[outputs, rank]` with the scale multiplied in.
        gains: of the shards with DoRA.
    """

    down: LinearWeight
    ups: Sequence[tuple[slice, slice, LinearWeight]]
    gains: Sequence[OutputGain] = ()

    def add_(self, out: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add to `rows` (int64 `[n]`; None: all rows) of `out [rows, out]` in place, from `x [rows, in]`."""
        for gain in self.gains:
            gain.apply_(out, rows)
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


ENCODER_ROWS = 1024  # rows of an encoder's layer that are changed at a time, so that the memory for it is bounded


class ActiveAdapters:
    """The adapters of the current step, or of the current call of an encoder. Shared by the layers of decoder or encoders.

    Attributes:
        num_rows: rows of the step. None in an encoder, whose layers have any number of rows and all use one adapter.
    """

    def __init__(self) -> None:
        self.groups: Sequence[RowGroup] = ()
        self.num_rows: int | None = None


@dataclass(frozen=True)
class AdapterSlot:
    """The place of one Linear in a model whose requests choose adapters."""

    number: int
    active: ActiveAdapters

    def add_(self, out: Tensor, x: Tensor) -> None:
        """Add the adapters of the step to `out [rows, out]` in place."""
        for group in self.active.groups:
            pairs = group.pairs.get(self.number)
            if pairs is None:
                continue
            if self.active.num_rows is None:
                for some_out, some_x in zip(out.split(ENCODER_ROWS), x.split(ENCODER_ROWS), strict=True):
                    pairs.add_(some_out, some_x, None)
            else:
                assert len(x) == self.active.num_rows, "the rows of an adapted layer are those of the step"
                pairs.add_(out, x, group.rows)
