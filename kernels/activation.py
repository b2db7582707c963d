"""Gated activations of packed rows: torch and C++. Knows no weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .native import call


def silu_mul_reference(x: Tensor) -> Tensor:
    """`silu(gate) * up` of `x [rows, gate | up]`, rounded to x's dtype between the two, as the published models do."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul(x: Tensor) -> Tensor:
    """`x [rows, 2 * inner]`, gate then up -> `[rows, inner]`."""
    if backend("silu_mul", x.device, x.dtype) != "native" or not x.is_contiguous():
        return silu_mul_reference(x)
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    call("silu_mul", x.dtype, x, out, x.shape[0], out.shape[1])
    return out
