"""RMSNorm and LayerNorm over the last axis."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import implementation


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """Normalise `x [..., dim]`; `weight [dim]` has x's dtype. `add`, a residual of x's shape, is first added to x in place."""
    normed: Tensor = implementation("rms_norm", x.device, x.dtype, x.shape[-1]).rms_norm(x, weight, eps, add, offset)
    return normed


def norm_heads_(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """Apply RMSNorm to every head of `x [rows, heads, dim]` in place. Rows of x may be strided. `weight [dim]`."""
    implementation("rms_norm", x.device, x.dtype, x.shape[-1]).norm_heads_(x, weight, eps, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """Normalise `x [..., dim]`; `weight, bias [dim]`. `add`, a residual of x's shape, is first added to x in place."""
    normed: Tensor = implementation("layer_norm", x.device, x.dtype, x.shape[-1]).layer_norm(x, weight, bias, eps, add)
    return normed
