"""Activations, plain and gated: torch and C++. Knows no weights.

In torch an element at the end of a tensor, or of a thread's share, is computed in another way and may differ in its last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .native import call


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, CLIP's approximation."""
    return x * torch.sigmoid(1.702 * x)


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "quick_gelu": quick_gelu}
"""In the order of the C++ kernel's numbers."""


def activation(name: str, x: Tensor) -> Tensor:
    """One of REFERENCES of each element."""
    if backend("activation", x.device, x.dtype) != "native" or not x.is_contiguous():
        return REFERENCES[name](x)
    out = torch.empty_like(x)
    call("activation", x.dtype, list(REFERENCES).index(name), x, out, x.numel())
    return out


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
