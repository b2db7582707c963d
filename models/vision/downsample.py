"""Convolutions that shrink the grid of rows that a tower returns for one view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..memory_formulas import OpBytes


@dataclass(frozen=True)
class Convolution:
    """A convolution with a bias over square grids; `name` is that of its layer in the checkpoint."""

    name: str
    width: int
    out: int
    kernel: int = 3
    stride: int = 2
    padding: int = 1

    def side(self, side: int) -> int:
        """Return the side of the result."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


class Downsampler(TensorModule):
    """Rows of one square view, row by row `[side^2, width]` -> those of the smaller grid."""

    def __init__(self, specs: Sequence[Convolution], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, dtype, device)
        self.specs = tuple(specs)
        self.layers = [
            build.linear([convolution.name], convolution.width * convolution.kernel**2, [convolution.out], True)
            for convolution in specs
        ]

    def forward(self, x: Tensor, side: int) -> Tensor:
        for spec, layer in zip(self.specs, self.layers, strict=True):
            x = layer(taps(x, side, spec.kernel, spec.stride, spec.padding))
            side = spec.side(side)
        return x

    def rows(self, side: int) -> int:
        """Return the rows of a view of `side` x `side` patches."""
        for spec in self.specs:
            side = spec.side(side)
        return side**2


def taps(x: Tensor, side: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> Tensor:
    """Return the inputs of a zero-padded convolution over `[side^2, width]`: `[outputs, width * kernel^2]`, in weight order."""
    plane = x.view(1, side, side, -1).permute(0, 3, 1, 2)
    return F.unfold(plane, kernel, padding=padding, stride=stride)[0].T.contiguous()


def downsampler_bytes(specs: Sequence[Convolution], side: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in Downsampler for one view of `side` x `side` patches, beside its input."""
    ops, peak, base = OpBytes(dtype, limits), 0, 0
    for spec in specs:
        inner, copy = spec.width * spec.kernel**2, side**2 * spec.width * dtype.itemsize
        side = spec.side(side)
        rows = side**2
        unfolded = rows * inner * dtype.itemsize
        peak = max(peak, base + copy + 2 * unfolded, base + unfolded + rows * ops.linear(inner, spec.out, rows))
        base = rows * spec.out * dtype.itemsize
    return peak
