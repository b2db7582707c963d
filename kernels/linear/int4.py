"""Quantisation to 4 bits with one scale per group of inputs. groups.py has the products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import backend
from .grouped import GroupedWeight, panel_rows
from .groups import panel_bytes

MAX_CODE = 15
SYMMETRIC_ZERO = 8  # zero point of all groups in symmetric quantisation


@dataclass(frozen=True)
class Int4Options:
    """Options of 4-bit quantisation.

    Args:
        group_size: number of adjacent inputs that share a scale.
        symmetric: values are -8 to 7 times the scale; otherwise each group has a zero point.
        int8_rows: quantise activations to int8.
    """

    group_size: int = 128
    symmetric: bool = True
    int8_rows: bool = False


def quantize_int4(weight: Tensor, options: Int4Options) -> GroupedWeight:
    """Quantise `weight [out, in]` by rounding to nearest. Scales have the weight's dtype."""
    parts = [_quantize(part, options.group_size, options.symmetric) for part in weight.split(panel_rows(weight.shape[1]))]
    codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    inputs = weight.shape[1]
    if options.symmetric:
        return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, offset=SYMMETRIC_ZERO)
    return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, zero=zero)


def _quantize(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return two codes per byte, the scales and the zero points of all groups."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    span = torch.maximum(-low, high).mul_(2) if symmetric else high - low
    scale = (span / MAX_CODE).to(weight.dtype)
    step = torch.where(scale > 0, scale, 1).float()
    zero = torch.full_like(step, SYMMETRIC_ZERO) if symmetric else (-low / step).round_().clamp_(0, MAX_CODE)
    codes = groups.div_(step[..., None]).add_(zero[..., None]).round_().clamp_(0, MAX_CODE).to(torch.uint8).flatten(1)
    codes = F.pad(codes, (0, inputs % 2))[:, : inputs + inputs % 2]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero.to(torch.uint8)


def int4_bytes(inner: int, outer: int, dtype: torch.dtype, device: torch.device, options: Int4Options) -> int:
    """Return the bytes of a weight `[outer, inner]` in `dtype` after `quantize_int4` and `pack_groups`."""
    groups = -(-inner // options.group_size)
    grid = groups * (dtype.itemsize + (not options.symmetric))
    if backend("int4_linear", device, dtype) != "native":
        return outer * (-(-inner // 2) + grid)
    return panel_bytes(outer, inner, grid + 4)
