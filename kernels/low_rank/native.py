"""Low-rank adapters in C++: one call per layer changes the rows of all adapters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..linear.panels import map_pages
from ..native import call
from . import LowRankWeights

_SHARD, _LAYER, _GROUP = 7, 4, 3  # numbers of each struct in cpu/low_rank.cpp
_GROUPS = 64  # adapters for which a table has room at first


class AdapterTable:
    """Table of addresses from which the kernel reads an adapter's matrices, by layer.

    The matrices lie in one piece of memory in the order in which they are added. A step reads each one once. On small pages,
    which they would share with other tensors, this takes a third longer.

    Args:
        num_layers: of the model.
        num_bytes: of all matrices that will be added, or more.
    """

    def __init__(self, num_layers: int, num_bytes: int) -> None:
        self.layers = torch.zeros(num_layers, _LAYER, dtype=torch.int64)
        self._memory, self._used = map_pages(max(1, num_bytes)), 0
        self._products, self._shards = dict[int, LowRankWeights](), dict[int, Tensor]()

    def add(self, number: int, weights: LowRankWeights) -> None:
        """Copy the matrices of a layer. Add the layers in the order of their numbers, in which a step reads them."""
        down, ups = self._copy(weights.down), [(ranks, outputs, self._copy(up)) for ranks, outputs, up in weights.ups]
        gains = {shard: (self._copy(gain), self._copy(shift)) for shard, (gain, shift) in weights.gains.items()}
        self._products[number] = replace(weights, down=down, ups=ups, gains=gains)
        self._shards[number] = shards = torch.tensor(_shards(self._products[number]))
        self.layers[number] = torch.tensor((down.data_ptr(), len(down), len(shards), shards.data_ptr()))

    def _copy(self, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        copied = torch.frombuffer(self._memory, dtype=part.dtype, count=part.numel(), offset=self._used).view(part.shape)
        self._used += part.nbytes
        return copied.copy_(part)


def _shards(weights: LowRankWeights) -> list[list[int]]:
    """Return the numbers of each shard: ranks, outputs, and addresses."""
    shards = []
    for number, (ranks, outputs, up) in enumerate(weights.ups):
        gain = [tensor.data_ptr() for tensor in weights.gains.get(number, ())] or [0, 0]
        shards.append(
            [ranks.start, ranks.stop - ranks.start, outputs.start, outputs.stop - outputs.start, up.data_ptr(), *gain]
        )
    return shards


class StepTable:
    """The adapters of a step and their rows. Its address stays, so that recorded calls read the adapters of each step."""

    def __init__(self) -> None:
        self._table = torch.zeros(1 + _GROUPS * _GROUP, dtype=torch.int64)
        self._keep: list[tuple[Tensor | None, AdapterTable]] = []

    @property
    def address(self) -> int:
        """Address of the table. It changes when a step has more adapters than any step before."""
        return self._table.data_ptr()

    @property
    def is_empty(self) -> bool:
        return not self._keep

    def write(self, groups: Sequence[tuple[Tensor | None, AdapterTable]]) -> None:
        """Set the adapters and their rows, int64 `[n]` on the CPU; None: all rows of a call."""
        groups = [(rows, adapter) for rows, adapter in groups if rows is None or len(rows)]  # an empty tensor has no address
        numbers = [len(groups)]
        for rows, adapter in groups:
            numbers += [0, 0] if rows is None else [len(rows), rows.data_ptr()]
            numbers.append(adapter.layers.data_ptr())
        if len(numbers) > len(self._table):
            self._table = torch.zeros(2 * len(numbers), dtype=torch.int64)
        self._table[: len(numbers)] = torch.tensor(numbers)
        self._keep = groups

    def add_(self, out: Tensor, x: Tensor, number: int) -> None:
        """Add the adapters to `out [rows, outputs]` of layer `number` in place, from `x [rows, inputs]` of the same dtype.

        The numbers of a row of `out` are adjacent in memory.
        """
        assert x.dtype == out.dtype
        assert out.stride(1) == 1
        x = x if x.stride(1) == 1 else x.contiguous()
        call("low_rank", x.dtype, x, x.stride(0), out, out.stride(0), *x.shape, number, self._table)
