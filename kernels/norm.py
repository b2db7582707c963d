"""RMSNorm and LayerNorm over the last axis, in torch, C++ and Triton.

`F.rms_norm` is not used: in half precision it rounds once less than the published models do, and on a CPU (torch 2.13) it
takes seven times as long for 1024 x 512 bfloat16 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .native import call


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute `x / rms(x)` in float32, round it to x's dtype, and multiply by `weight` (Zhang & Sennrich 2019).

    With an `offset`, multiply by `weight + offset` in float32 and round once, as models with weights around 0 do (Gemma).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.mul_(weight.float() + offset)).to(x.dtype) if offset else normed.to(x.dtype).mul_(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """Normalise `x [..., dim]`; `weight [dim]` has x's dtype. `add`, a residual of x's shape, is first added to x in place."""
    chosen = backend("rms_norm", x.device, x.dtype, x.shape[-1])
    if chosen == "native" and _contiguous(x, add):
        out = torch.empty_like(x)
        call("norm", x.dtype, x, add, weight, out, x.numel() // x.shape[-1], x.shape[-1], eps, offset)
        return out
    if chosen == "triton" and _contiguous(x, add):
        from .gpu import norm

        return norm.rms_norm(x, weight, eps, add, offset)
    if add is not None:
        x += add
    return rms_norm_reference(x, weight, eps, offset)


def norm_heads_(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """Apply RMSNorm to every head of `x [rows, heads, dim]` in place. Rows of x may be strided. `weight [dim]`."""
    n, heads, dim = x.shape
    chosen = backend("rms_norm", x.device, x.dtype, dim)
    if chosen == "native" and x.stride(2) == 1 and x.stride(1) == dim:
        call("norm_heads", x.dtype, x, x.stride(0), weight, n, heads, dim, eps, offset)
    elif chosen == "triton" and x.stride(2) == 1:
        from .gpu import norm

        norm.norm_heads_(x, weight, eps, offset)
    else:
        x.copy_(rms_norm_reference(x, weight, eps, offset))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """Normalise `x [..., dim]`; `weight, bias [dim]`. `add`, a residual of x's shape, is first added to x in place."""
    if backend("layer_norm", x.device, x.dtype, x.shape[-1]) == "triton" and _contiguous(x, add):
        from .gpu import norm

        return norm.layer_norm(x, weight, bias, eps, add)
    if add is not None:
        x += add
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _contiguous(x: Tensor, add: Tensor | None) -> bool:
    """Return whether both tensors are contiguous."""
    return x.is_contiguous() and (add is None or add.is_contiguous())
