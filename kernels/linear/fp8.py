"""Linear layers with 8-bit float weights (e4m3) and one scale per output, in torch and Triton.

GPUs with 8-bit float matrix units (sm_89 and later) also quantise the activations, with one scale per row. Elsewhere only
the weights are quantised and sums are in float32. The format is from arXiv 2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import backend
from .eight_bit import FP8_MAX, Fp8Weight
from .mkl import multiply_padded, pad_rows

_MIN_ABSMAX = 1e-30  # lower bound of a row's absmax
_CHUNK_OUTPUTS = 256  # outputs whose weights torch dequantises at a time


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x [rows, n]` to float8_e4m3fn; each row's absmax becomes 448. Return it and the float32 scales `[rows, 1]`."""
    scale = x.abs().amax(1, keepdim=True).float().clamp_(min=_MIN_ABSMAX).div_(FP8_MAX)
    return x.float().div(scale).to(torch.float8_e4m3fn), scale


def pack_fp8(weight: Tensor, bias: Tensor | None) -> Fp8Weight:
    """Quantise `weight [out, in]` with one scale per output."""
    rounded, scale = quantize_rows_fp8(weight)
    return Fp8Weight(rounded, scale.flatten(), bias)


def fp8_linear_reference(x: Tensor, weights: Fp8Weight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype, rounded once. Activations are not quantised."""
    out, wide = x.new_empty(len(x), len(weights.weight)), pad_rows(x.float())
    for start in range(0, len(weights.weight), _CHUNK_OUTPUTS):
        part = slice(start, start + _CHUNK_OUTPUTS)
        product = multiply_padded(wide, weights.weight[part].float()).mul_(weights.scale[part])
        out[:, part] = (product if weights.bias is None else product.add_(weights.bias[part]))[: len(x)]
    return out


def fp8_linear(x: Tensor, weights: Fp8Weight) -> Tensor:
    """Compute `fp8_linear_reference`; GPUs with 8-bit float matrix units quantise the rows first (`quantize_rows_fp8`)."""
    if backend("fp8_linear", x.device, x.dtype) == "triton":
        from .triton import eight_bit

        return eight_bit.fp8_linear(x, weights)
    return fp8_linear_reference(x, weights)
