"""Weights of published quantised checkpoints: codes with one scale per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .blocks import BlockWeight

PANEL_NUMBERS = 1 << 19  # weights that are dequantised at a time, if an output has no more
PANEL_BYTES = 16  # per weight of a panel: its code, index, float value and product with the scale


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight `[out, in]` of value `(v - offset - zero) * scale * factor + shift`; v is the code or its entry in `table`.

    Args:
        codes: `[out, in]` in 8 bits (integers or float8); or uint8 `[out, words]` with two codes of 4 bits per byte, the first
            in the low bits, and padding behind them.
        scale: `[out / block_rows, groups]`, any float. Group g of an output has its columns from g * `group` on.
        group: columns of a group.
        inputs: number of columns.
        block_rows: outputs that share a row of `scale` and `zero`.
        zero, shift: same shape as `scale`, or None.
        offset: zero point that all groups share.
        table: float32 value of each code, or None.
        group_index: int32 `[in]`, the group of each column, for groups whose columns are not adjacent.
        factor: float32 with one number, or None.
    """

    codes: Tensor
    scale: Tensor
    group: int
    inputs: int
    block_rows: int = 1
    packed: bool = False
    offset: int = 0
    zero: Tensor | None = None
    table: Tensor | None = None
    group_index: Tensor | None = None
    factor: Tensor | None = None
    shift: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """Return the weight with `change` applied to each of its tensors."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changed)

    def output_scales(self, codes: torch.dtype = torch.int8) -> Tensor | None:
        """Return the float32 scale of each output, or None if the weight is not such codes times one scale per output."""
        others = (self.zero, self.table, self.group_index, self.shift)
        if self.codes.dtype != codes or self.offset or self.group < self.inputs or any(grid is not None for grid in others):
            return None
        scales = self.scale[:, 0].float().repeat_interleave(self.block_rows)[: len(self.codes)]
        return scales if self.factor is None else scales * self.factor

    def select(self, rows: slice) -> GroupedWeight:
        """Return the weight with some of its outputs."""
        codes, each = self.codes[rows], self.block_rows
        first, last, step = rows.indices(len(self.codes))
        if len(self.scale) == 1 and each > 1:
            return replace(self, codes=codes, block_rows=len(codes))
        if step > 1 or first % each or (last % each and last < len(self.codes)):
            blocks, each = torch.arange(first, last, step, device=codes.device) // each, 1
        else:
            blocks = torch.arange(first // each, -(-last // each), device=codes.device)
        zero, shift = (None if grid is None else grid[blocks] for grid in (self.zero, self.shift))
        scale = self.scale.view(torch.uint8)[blocks].view(self.scale.dtype) if self.scale.itemsize == 1 else self.scale[blocks]
        return replace(self, codes=codes, scale=scale, zero=zero, shift=shift, block_rows=each)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def dequantize(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return the outputs from `first` to before `last` (None: to the end) in float32."""
        codes = self.codes[first:last]
        if self.packed:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : self.inputs]
        if self.table is not None:
            values = self.table.index_select(0, codes.flatten().int()).view(codes.shape)
        else:
            values = codes.float()
        if self.offset:
            values.sub_(self.offset)
        rows = (first, first + len(codes))
        if self.zero is not None:
            self._apply(values, self.zero, rows, Tensor.sub_)
        self._apply(values, self.scale, rows, Tensor.mul_)
        if self.factor is not None:
            values.mul_(self.factor)
        if self.shift is not None:
            self._apply(values, self.shift, rows, Tensor.add_)
        return values

    def _apply(self, values: Tensor, grid: Tensor, rows: tuple[int, int], change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Change `values` in place by the entries of `grid` (one per block) of their rows."""
        (first, last), each = rows, self.block_rows
        start = first // each
        entries = grid[start : -(-last // each)].float()
        if each > 1:
            entries = entries.repeat_interleave(each, 0)[first - start * each : last - start * each]
        if self.group_index is not None:
            change(values, entries.index_select(1, self.group_index))
        elif self.inputs % self.group == 0:
            change(values.unflatten(1, (-1, self.group)), entries[..., None])
        else:
            change(values, entries.repeat_interleave(self.group, 1)[:, : self.inputs])


QuantizedWeight = GroupedWeight | BlockWeight


@dataclass(frozen=True, eq=False)
class ShardedWeight:
    """The quantised weights of a Linear's shards, concatenated along the outputs, and its bias.

    `int8_rows`: quantise activations to int8 with one scale per row.
    """

    shards: Sequence[QuantizedWeight]
    bias: Tensor | None
    int8_rows: bool = False

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards) + (0 if self.bias is None else self.bias.nbytes)


def panel_rows(inputs: int) -> int:
    """Return the number of outputs that are dequantised at a time."""
    return max(1, PANEL_NUMBERS // max(1, inputs))
