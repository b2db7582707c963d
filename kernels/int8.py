"""Products in 8 bits: weights with a scale per output, rows with a scale of their own. Knows no slices, no model.

Both are symmetric (zero is zero). A row's scale comes from that row and sums of integers have no order, so a row's result
is the same bits whatever is multiplied beside it. Source of the scheme: arXiv 2206.01861, section 4.1 (ZeroQuant).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = 127
_TINY = 1e-30  # the scale of a row of zeros: any positive number


@dataclass(frozen=True, eq=False)
class Int8:
    """`weight` int8 `[out, in]`, `scale` float32 `[out]`: the original is about `weight * scale[:, None]`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def supported(device: torch.device) -> bool:
    """Whether products of 8-bit numbers are exact and fast: x86 CPUs with VNNI."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [rows, n]` -> int8 `[rows, n]` and float32 scales `[rows, 1]`; each row's largest magnitude becomes 127."""
    scale = x.abs().amax(1, keepdim=True).float().div_(LEVELS).clamp_(min=_TINY)
    return (x / scale).round_().to(torch.int8), scale


def pack_int8(weight: Tensor, bias: Tensor | None) -> Int8:
    """Quantise `weight [out, in]`, one scale per output."""
    quantized, scale = quantize_rows(weight.float())
    return Int8(quantized, scale.flatten(), bias)


def int8_linear(x: Tensor, weights: Int8) -> Tensor:
    """`x [rows, in]` -> `[rows, out]` in x's dtype, rounded once."""
    rows, scale = quantize_rows(x)
    out = torch._int_mm(rows, weights.weight.t()).float().mul_(scale).mul_(weights.scale)
    if weights.bias is not None:
        out.add_(weights.bias)
    return out.to(x.dtype)
