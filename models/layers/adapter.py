"""Low-rank adapters (LoRA) on the shards of a Linear, applied per row.

Source: arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...checkpoints.adapters import AdapterSpec, tensor_name
from ...kernels.linear import LinearWeight, linear, pack
from ..interface import StepLimits
from ..memory_formulas import OpBytes, packed_weight_bytes
from .basic import WeightedLayer


@dataclass(frozen=True)
class AdapterBytes:
    """Bytes per row that an adapter allocates beside the result of a part's first linear layer, and of its last one."""

    first: int = 0
    last: int = 0


NO_ADAPTERS = AdapterBytes()


class AdapterMask:
    """Marks the rows of a step that an adapter does not apply to. Shared by all layers of a model; set before each forward."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []  # per adapter, bool `[rows, 1]`, True: not applied; empty if no row has an adapter

    def set(self, adapters: Tensor | None, count: int) -> None:
        """Set the masks of a step. `adapters`: as in ForwardBatch; `count`: number of adapters of the model."""
        self.masks = [] if adapters is None else [(adapters != number)[:, None] for number in range(1, count + 1)]


class AdaptedLayer(Protocol):
    """The part of a Linear that its adapters read."""

    weight: Tensor  # [outputs, in]
    outputs: int
    dtype: torch.dtype
    device: torch.device


class LowRank(WeightedLayer):
    """Adds `up(down(x)) * scale` to one shard of a Linear, for the rows that use its adapter. Never quantised.

    For all other rows it adds zeros: every row goes through the same products, so its bits do not depend on the batch.

    Args:
        stem: canonical name of the shard; the names of both matrices begin with it.
        layer: the Linear, for input width, dtype and device.
        rows: number of the shard's outputs.
        number: index of the adapter in the model, from 0.
    """

    def __init__(self, stem: str, layer: AdaptedLayer, rows: int, spec: AdapterSpec, number: int, mask: AdapterMask) -> None:
        super().__init__()
        self.stem, self.spec, self.number, self.mask = stem, spec, number, mask
        self.inner, self.outer, self.whole = layer.weight.shape[1], rows, rows == layer.outputs
        shapes = (spec.rank, self.inner), (rows, spec.rank)
        self.weights = tuple(torch.empty(shape, dtype=layer.dtype, device=layer.device) for shape in shapes)
        self.down: LinearWeight  # both exist from `pack` on, in place of `weights`
        self.up: LinearWeight

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        for letter, weight in zip("AB", self.weights, strict=True):
            yield tensor_name(self.stem, letter, self.spec.name), weight

    def pack(self) -> None:
        """Pack both matrices; the scale is multiplied into the second."""
        down, up = self.weights
        self.down, self.up = pack(down, None), pack(up.mul_(self.spec.scale), None)
        del self.weights

    def packed_bytes(self, device: torch.device) -> int:
        shapes, dtype = ((self.inner, self.spec.rank), (self.spec.rank, self.outer)), self.weights[0].dtype
        return sum(packed_weight_bytes(*shape, False, dtype, device) for shape in shapes)

    def add_(self, out: Tensor, x: Tensor) -> None:
        """Add to `out [rows, shard]` in place, from `x [rows, in]`. Does nothing if no row of the step has an adapter."""
        if self.mask.masks:
            out += linear(linear(x, self.down).masked_fill_(self.mask.masks[self.number], 0.0), self.up)


def adapter_bytes(adapters: Sequence[LowRank], width: int, limits: StepLimits, dtype: torch.dtype) -> AdapterBytes:
    """Return the bytes of the largest of these adapters, in parts (mixers or MLPs) whose results are `width` wide."""
    ops, first, last = OpBytes(dtype, limits), 0, 0
    for adapter in adapters:
        rank = adapter.spec.rank
        adapter_rows = ops.linear_result(rank, limits.rows) + ops.linear(rank, adapter.outer, limits.rows)
        if adapter.whole and adapter.outer == width:
            last = max(last, adapter_rows)
        else:
            first = max(first, adapter_rows)
    return AdapterBytes(first, last)
