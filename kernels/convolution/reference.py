"""Convolutions over time in torch."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

from . import PackedFilter


def pack(weight: Tensor, dilation: int) -> PackedFilter:
    """Compute `convolution.pack`."""
    return PackedFilter(weight, weight.shape[2], dilation, sys.modules[__name__])


def packed_size(shape: torch.Size) -> int:
    """Return how many numbers a packed weight has."""
    return shape.numel()


def convolve(x: Tensor, packed: PackedFilter, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Compute `convolution.convolve`."""
    result = F.conv1d(x, packed.weight, bias, padding=packed.dilation * (packed.taps // 2), dilation=packed.dilation)
    return result if add is None else result.add_(add)
