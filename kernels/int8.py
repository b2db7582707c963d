"""Products in 8 bits: weights with a scale per output, rows with a scale of their own. Knows no slices, no model.

Both are symmetric (zero is zero). A row's scale comes from that row and sums of integers have no order, so a row's result
is the same bits whatever is multiplied beside it. Source of the scheme: arXiv 2206.01861, section 4.1 (ZeroQuant).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import native
from .dispatch import backend
from .panels import pad_outputs, to_panels

LEVELS = 127
_TINY = 1e-30  # a row's largest magnitude is taken for no less


@dataclass(frozen=True, eq=False)
class Int8:
    """`weight` int8 `[out, in]`, `scale` float32 `[out]`: the original is about `weight * scale[:, None]`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Int8Panels:
    """The same for the C++ kernel.

    Args:
        panels: int8, see `panels.to_panels`.
        shift: int32 `[out of all panels]`, 128 times the sum of each output's weights.
        scale, bias: float32, as many.
        outputs: `out` without padding.
    """

    panels: Tensor
    shift: Tensor
    scale: Tensor
    bias: Tensor
    outputs: int


def supported(device: torch.device) -> bool:
    """Whether products of 8-bit numbers are exact and fast: x86 CPUs with AVX-512 VNNI, GPUs with Triton."""
    if device.type != "cpu":
        return backend("int8_linear", device, torch.bfloat16) == "triton"
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [rows, n]` -> int8 `[rows, n]` and float32 scales `[rows, 1]`; each row's largest magnitude becomes 127."""
    largest = x.abs().amax(1, keepdim=True).float().clamp_(min=_TINY)
    return x.float().mul(largest.reciprocal().mul_(LEVELS)).round_().to(torch.int8), largest / LEVELS


def pack_int8(weight: Tensor, bias: Tensor | None) -> Int8 | Int8Panels:
    """Quantise `weight [out, in]`, one scale per output."""
    quantized, scale = quantize_rows(weight)
    if backend("int8_linear", weight.device, weight.dtype) != "native":
        return Int8(quantized, scale.flatten(), bias)
    shift = pad_outputs(quantized.sum(1, dtype=torch.int32).mul_(128))
    wide = torch.zeros(len(weight)) if bias is None else bias.float()
    return Int8Panels(to_panels(quantized), shift, pad_outputs(scale.flatten()), pad_outputs(wide), len(weight))


def int8_linear_reference(x: Tensor, weights: Int8) -> Tensor:
    """`x [rows, in]` -> `[rows, out]` in x's dtype, rounded once."""
    rows, scale = quantize_rows(x)
    out = torch._int_mm(rows, weights.weight.t()).float().mul_(scale).mul_(weights.scale)
    if weights.bias is not None:
        out.add_(weights.bias)
    return out.to(x.dtype)


def int8_linear(x: Tensor, weights: Int8 | Int8Panels) -> Tensor:
    """See `int8_linear_reference`, whose bits it gives; rows that are not finite give some that are not, either way."""
    if isinstance(weights, Int8):
        if backend("int8_linear", x.device, x.dtype) == "triton":
            from .gpu import linear

            return linear.int8_linear(x, weights)
        return int8_linear_reference(x, weights)
    (rows, inputs), words, w = x.shape, weights.panels.shape[1], weights
    out = x.new_empty(rows, w.outputs)
    scratch = torch.empty(rows, 4 * words + 4, dtype=torch.uint8)  # of each row its bytes and its scale
    packed = (w.panels, w.shift, w.scale, w.bias, words, w.outputs)
    native.call("int8_linear", x.dtype, x.contiguous(), rows, inputs, *packed, scratch, out)
    return out
