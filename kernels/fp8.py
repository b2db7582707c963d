"""Products with weights as 8-bit floats (e4m3), a scale per output: torch and Triton. Knows no slices, no model.

Cards with such products (sm_89 and later) take rows as 8-bit floats too, with a scale of their own; elsewhere only the weights
are, and sums are in float32. Source of the format: arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend

LARGEST = 448.0  # of the format
_TINY = 1e-30  # a row's largest magnitude is taken for no less
_AT_ONCE = 256  # outputs whose weights torch widens at a time
_FEWEST = 16  # rows of a product, see `linear`


@dataclass(frozen=True, eq=False)
class Fp8:
    """`weight` float8_e4m3fn `[out, in]`, `scale` float32 `[out]`: the original is about `weight * scale[:, None]`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [rows, n]` -> float8_e4m3fn `[rows, n]` and float32 scales `[rows, 1]`; each row's largest magnitude becomes 448."""
    scale = x.abs().amax(1, keepdim=True).float().clamp_(min=_TINY).div_(LARGEST)
    return x.float().div(scale).to(torch.float8_e4m3fn), scale


def pack_fp8(weight: Tensor, bias: Tensor | None) -> Fp8:
    """Round `weight [out, in]`, one scale per output."""
    rounded, scale = round_rows(weight)
    return Fp8(rounded, scale.flatten(), bias)


def fp8_linear_reference(x: Tensor, weights: Fp8) -> Tensor:
    """`x [rows, in]` -> `[rows, out]` in x's dtype, rounded once; rows are as they come."""
    out, wide = x.new_empty(len(x), len(weights.weight)), F.pad(x.float(), (0, 0, 0, max(0, _FEWEST - len(x))))
    for start in range(0, len(weights.weight), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        made = (wide @ weights.weight[part].float().t()).mul_(weights.scale[part])
        out[:, part] = (made if weights.bias is None else made.add_(weights.bias[part]))[: len(x)]
    return out


def fp8_linear(x: Tensor, weights: Fp8) -> Tensor:
    """See `fp8_linear_reference`; on cards with products of 8-bit floats rows are rounded to them first (`round_rows`)."""
    if backend("fp8_linear", x.device, x.dtype) == "triton":
        from .gpu import linear

        return linear.fp8_linear(x, weights)
    return fp8_linear_reference(x, weights)
