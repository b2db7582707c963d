"""Weights of 4 bits with a scale per group of inputs, quantised here (round to nearest).

The activations stay as they are, or are quantised to int8 with one scale per row, as in int8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .grouped import GroupedWeight, ShardedWeight, panel_rows

LARGEST = 15
MIDDLE = 8


@dataclass(frozen=True)
class Int4Options:
    """How weights are quantised to 4 bits.

    Args:
        group_size: adjacent inputs that share a scale.
        symmetric: codes stand for -8 to 7 times the scale; otherwise each group also has a zero point.
        int8_rows: activations are quantised to int8, too.
    """

    group_size: int = 128
    symmetric: bool = True
    int8_rows: bool = False


def quantize_int4(weight: Tensor, options: Int4Options) -> GroupedWeight:
    """Quantise `weight [out, in]`, rounded to nearest. Scales have the weight's dtype."""
    each = panel_rows(weight.shape[1])
    parts = [_quantize(part, options.group_size, options.symmetric) for part in weight.split(each)]
    codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    inputs = weight.shape[1]
    if options.symmetric:
        return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, offset=MIDDLE)
    return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, zero=zero)


def _quantize(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return two codes per byte, the scales and the zero points of all groups."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    wide = torch.maximum(-low, high).mul_(2) if symmetric else high - low
    scale = (wide / LARGEST).to(weight.dtype)
    step = torch.where(scale > 0, scale, 1).float()
    zero = torch.full_like(step, MIDDLE) if symmetric else (-low / step).round_().clamp_(0, LARGEST)
    codes = groups.div_(step[..., None]).add_(zero[..., None]).round_().clamp_(0, LARGEST).to(torch.uint8).flatten(1)
    codes = F.pad(codes, (0, inputs % 2))[:, : inputs + inputs % 2]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero.to(torch.uint8)


def pack_int4(shards: Sequence[GroupedWeight], bias: Tensor | None, int8_rows: bool) -> ShardedWeight:
    """Pack the weights of a Linear's shards for their device."""
    return ShardedWeight(shards, bias, int8_rows)


def int4_bytes(inner: int, outer: int, dtype: torch.dtype, options: Int4Options) -> int:
    """Return the bytes of a weight `[outer, inner]` in `dtype` after `quantize_int4` and `pack_int4`."""
    groups = -(-inner // options.group_size)
    return outer * (-(-inner // 2) + groups * (dtype.itemsize + (not options.symmetric)))
