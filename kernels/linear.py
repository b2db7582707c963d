"""Matrix times weights that never change: packed once for the CPU, plain elsewhere. Knows no slices, no model.

Packed weights are 1.3 to 3 times faster than `F.linear` for the 1 to 32 rows of a decode step, since they need not be laid
out anew at every call; in bfloat16 the C++ kernel, which fetches weights ahead, takes another 10 to 30 % off.

On a CPU a row's result is the same bits whatever rows are multiplied beside it. Two things stand against that, and rows of
zeros help: oneDNN has a kernel for a single row that adds in another order, so one is made two, which takes as long; and MKL,
behind the plain form in float32, has others for less than 12 rows, so they are made 16.

oneDNN also writes code for every number of rows it meets, about 1 MB each, and what it frees comes back slowly: 600 different
batches through four float32 layers left 1.6 GB behind. Padded to 8 numbers for every doubling it is 0.27 GB, at the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .dispatch import backend
from .fp8 import Fp8, fp8_linear, pack_fp8
from .int8 import Int8, Int8Panels, int8_linear, pack_int8
from .panels import pad_outputs, to_panels

_FEWEST_PACKED, _FEWEST_PLAIN = 2, 16


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in oneDNN's own blocked layout (opaque) and its bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Plain:
    """A weight `[out, in]` as it came, and its bias `[out]`."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Panels:
    """A bfloat16 weight for the C++ kernel (`panels.to_panels`), its bias in float32 for every padded output."""

    weight: Tensor
    bias: Tensor
    outputs: int


Weights = Panels | Packed | Plain | Int8 | Int8Panels | Fp8


def pack(weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> Weights:
    """Lay `weight [out, in]` out for its device; the caller drops the original. `quantization`: None, "int8" or "fp8"."""
    if quantization == "int8":
        return pack_int8(weight, bias)
    if quantization == "fp8":
        return pack_fp8(weight, bias)
    chosen = backend("linear", weight.device, weight.dtype)
    if chosen == "native" and weight.shape[1] % 2 == 0:
        wide = torch.zeros(len(weight)) if bias is None else bias.float()
        return Panels(to_panels(weight), pad_outputs(wide), len(weight))
    if chosen == "torch":
        return Plain(weight, bias)
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)


def linear(x: Tensor, weights: Weights) -> Tensor:
    """`x [rows, in]` -> `[rows, out]`."""
    if isinstance(weights, (Int8, Int8Panels)):
        return int8_linear(x, weights)
    if isinstance(weights, Fp8):
        return fp8_linear(x, weights)
    if isinstance(weights, Panels):
        out = x.new_empty(len(x), weights.outputs)
        packed = (weights.weight, weights.bias, weights.weight.shape[1], weights.outputs)
        native.call("linear", x.dtype, x.contiguous(), len(x), *packed, out)
        return out
    if isinstance(weights, Packed):
        return _with_rows(x, padded_rows(len(x)), weights)
    if x.device.type == "cpu":
        return _with_rows(x, max(len(x), _FEWEST_PLAIN), weights)
    return F.linear(x, weights.weight, weights.bias)


def padded_rows(rows: int) -> int:
    """The number of rows that a packed product of so many is made with: 1 -> 2, 7 -> 7, 100 -> 104, 1000 -> 1024."""
    step = 1 << max(0, rows.bit_length() - 4)
    return max(-(-rows // step) * step, _FEWEST_PACKED)


def _with_rows(x: Tensor, rows: int, weights: Packed | Plain) -> Tensor:
    padded = F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x
    if isinstance(weights, Packed):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weights.weight, weights.bias, "none", [], "")
    else:
        out = F.linear(padded, weights.weight, weights.bias)
    return out[: len(x)]
