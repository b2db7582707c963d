"""RMSNorm in C++; tensors with other strides than its kernels take are normalised in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import call
from . import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """Compute `norm.rms_norm`."""
    if not reference.contiguous(x, add):
        return reference.rms_norm(x, weight, eps, add, offset)
    out = torch.empty_like(x)
    call("norm", x.dtype, x, add, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps, offset)
    return out


def norm_heads_(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """Compute `norm.norm_heads_`."""
    n, heads, dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != dim:
        reference.norm_heads_(x, weight, eps, offset)
        return
    call("norm_heads", x.dtype, x, x.stride(0), weight, n, heads, dim, eps, offset)
