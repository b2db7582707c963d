"""W8A8 linear layers: int8 weights with one scale per output, int8 activations with one scale per row.

Both are symmetric (zero stays zero). A row's scale comes from that row alone and integer sums have no order, so a row's result
has the same bits in every batch. The scheme is from arXiv 2206.01861, section 4.1 (ZeroQuant).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..dispatch import backend
from .eight_bit import INT8_MAX, Int8Weight
from .panels import Panels, multiply_panels, pack_panels

_MIN_ABSMAX = 1e-30  # lower bound of a row's absmax
_PIECE = 4 << 20  # numbers of a weight that are quantised at a time, through float32


def supported(device: torch.device) -> bool:
    """Return whether the device multiplies int8 exactly and fast: CPUs with AVX2, NEON or AVX-512 VNNI, GPUs with Triton."""
    if device.type != "cpu":
        return backend("int8_linear", device, torch.bfloat16) == "triton"
    return native.products() is not None or (torch.backends.mkldnn.is_available() and native.has_vnni())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x [rows, n]` to int8; each row's absmax becomes 127. Return it and the float32 scales `[rows, 1]`."""
    largest = x.abs().amax(1, keepdim=True).float().clamp_(min=_MIN_ABSMAX)
    return x.float().mul(largest.reciprocal().mul_(INT8_MAX)).round_().to(torch.int8), largest / INT8_MAX


def pack_int8(weight: Tensor, bias: Tensor | None) -> Int8Weight | Panels:
    """Quantise `weight [out, in]` with one scale per output, and pack it for its device."""
    parts = [quantize_rows(part) for part in weight.split(max(_PIECE // weight.shape[1], 1))]
    codes, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return pack_codes(codes, scale.flatten(), bias, weight.dtype)


def pack_codes(codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Int8Weight | Panels:
    """Pack int8 `codes [out, in]` with a float32 scale per output for their device. `dtype`: of the layer's input."""
    if backend("int8_linear", codes.device, dtype) != "native":
        return Int8Weight(codes, scale, bias)
    return pack_panels(codes, bias, scale)


def int8_linear_reference(x: Tensor, weights: Int8Weight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype, rounded once."""
    rows, scale = quantize_rows(x)
    out = torch._int_mm(rows, weights.weight.t()).float().mul_(scale).mul_(weights.scale)
    if weights.bias is not None:
        out.add_(weights.bias)
    return out.to(x.dtype)


def int8_linear(x: Tensor, weights: Int8Weight | Panels) -> Tensor:
    """Compute `int8_linear_reference` with the same bits. Rows with NaN or infinity give results that are not finite."""
    if isinstance(weights, Panels):
        return multiply_panels(x, weights)
    if backend("int8_linear", x.device, x.dtype) == "triton":
        from .triton import eight_bit

        return eight_bit.int8_linear(x, weights)
    return int8_linear_reference(x, weights)
