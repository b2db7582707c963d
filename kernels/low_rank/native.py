"""Low-rank adapters in C++: one call per layer changes the rows of all adapters of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..native import call
from . import LowRankWeights

_SHARD, _LAYER, _GROUP = 7, 4, 3  # numbers of each struct in cpu/low_rank.cpp


class AdapterTable:
    """What an adapter adds to each layer, as the kernel reads it. It keeps the weights alive.

    Args:
        layers: by the number of the layer.
        num_layers: of the model.
    """

    def __init__(self, layers: Mapping[int, LowRankWeights], num_layers: int) -> None:
        self._weights = layers
        self._shards = {number: torch.tensor([_shard(weights, i) for i in range(len(weights.ups))]).view(-1, _SHARD)
                        for number, weights in layers.items()}  # fmt: skip
        self.layers = torch.zeros(num_layers, _LAYER, dtype=torch.int64)
        for number, weights in layers.items():
            shards = self._shards[number]
            self.layers[number] = torch.tensor((weights.down.data_ptr(), len(weights.down), len(shards), shards.data_ptr()))


def _shard(weights: LowRankWeights, i: int) -> list[int]:
    ranks, outputs, up = weights.ups[i]
    gain = weights.gains.get(i)
    pointers = (0, 0) if gain is None else (gain[0].data_ptr(), gain[1].data_ptr())
    return [ranks.start, ranks.stop - ranks.start, outputs.start, outputs.stop - outputs.start, up.data_ptr(), *pointers]


class StepTable:
    """The adapters of a step and their rows, at an address that stays, so that recorded calls read those of each step.

    Args:
        capacity: most adapters of a step.
    """

    def __init__(self, capacity: int) -> None:
        self._table, self._keep = torch.zeros(1 + capacity * _GROUP, dtype=torch.int64), list[object]()

    def write(self, groups: Sequence[tuple[Tensor | None, AdapterTable]], num_rows: int) -> None:
        """Set the adapters. Rows are int64 `[n]` on the CPU; None: all `num_rows` rows of the step."""
        numbers = [len(groups)]
        for rows, adapter in groups:
            numbers += [
                num_rows if rows is None else len(rows),
                0 if rows is None else rows.data_ptr(),
                adapter.layers.data_ptr(),
            ]
        self._table[: len(numbers)] = torch.tensor(numbers)
        self._keep = list(groups)

    def clear(self) -> None:
        self._table[0] = 0
        self._keep = []

    def add_(self, out: Tensor, x: Tensor, number: int) -> None:
        """Add the adapters to `out [rows, outputs]` of layer `number` in place, from `x [rows, inputs]`."""
        assert x.stride(1) == out.stride(1) == 1
        call("low_rank", x.dtype, x, x.stride(0), out, out.stride(0), x.shape[1], number, self._table)
