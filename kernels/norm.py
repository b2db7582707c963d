"""RMSNorm and LayerNorm over the last axis: reference, torch and Triton. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last axis, in float32 (Zhang & Sennrich 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., dim]`, `weight [dim]` of one dtype -> `[..., dim]`."""
    chosen = backend("rms_norm", x.device, x.dtype)
    if chosen == "triton":
        from .norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    if chosen == "reference":
        return rms_norm_reference(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`x [..., dim]`, `weight, bias [dim]` -> `[..., dim]`."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
