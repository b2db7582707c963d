"""Convolutions over time for long inputs, zero-padded, with a weight that is packed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dispatch import implementation


@dataclass(frozen=True, eq=False)
class PackedFilter:
    """A weight as its backend stores it.

    Args:
        weight: `[outer, inner, taps]`, or a layout of the backend. taps: an odd number.
        dilation: distance of adjacent taps in the input.
        backend: module that multiplies with it.
    """

    weight: Tensor
    taps: int
    dilation: int
    backend: Any


def pack(weight: Tensor, dilation: int) -> PackedFilter:
    """Pack `weight [outer, inner, taps]` for its device. The caller drops the original."""
    packed: PackedFilter = implementation("convolution", weight.device, weight.dtype, weight.shape[0]).pack(weight, dilation)
    return packed


def packed_bytes(weight: Tensor, device: torch.device) -> int:
    """Return the bytes of `pack` of a weight of this shape and dtype on `device`. Its values are not read."""
    size = implementation("convolution", device, weight.dtype, weight.shape[0]).packed_size(weight.shape)
    return weight.dtype.itemsize * int(size)


def convolve(x: Tensor, packed: PackedFilter, bias: Tensor | None, add: Tensor | None = None) -> Tensor:
    """Convolve `x [1, inner, time]` -> `[1, outer, time]`. `bias [outer]` and `add`, of the result's shape, are added."""
    result: Tensor = packed.backend.convolve(x, packed, bias, add)
    return result
