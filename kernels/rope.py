"""Rotary embedding: cosines and sines once per step, rotation in every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import backend
from .native import call


def rotary_cos_sin(positions: Tensor, inv_freq: Tensor, axis_of_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 `[rows, dim / 2]` each.

    Args:
        positions: `[axes, rows]`.
        inv_freq: float32 `[dim / 2]`.
        axis_of_freq: int64 `[dim / 2]`, the position axis of each frequency (M-RoPE sections; all 0 for 1-D positions).
    """
    angles = positions.to(torch.float32).index_select(0, axis_of_freq).T * inv_freq
    angles = angles.contiguous()  # every layer reads them row by row
    return angles.cos(), angles.sin()


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate `x [rows, heads, dim]` in float32 and return it in x's dtype. Pairs are as in `rotate_`."""
    c, s = cos[:, None], sin[:, None]
    if interleaved:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)
    a, b = x.float().chunk(2, -1)
    out, half = torch.empty_like(x), x.shape[-1] // 2
    out[..., :half] = (a * c).addcmul_(b, s, value=-1)  # few passes over memory: rotation is a fifth of a vision tower's time
    out[..., half:] = (b * c).addcmul_(a, s)
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Rotate `x [rows, heads, dim]` in place by float32 `cos, sin [rows, dim / 2]`. Rows and heads of x may be strided.

    A pair is (i, i + dim / 2) or, if `interleaved`, (2i, 2i + 1).
    """
    n, heads, dim = x.shape
    chosen = backend("rotary", x.device, x.dtype, dim)
    if chosen == "native" and x.stride(2) == 1:
        strides = (x.stride(0), x.stride(1))
        call("rotate", x.dtype, x, *strides, cos.contiguous(), sin.contiguous(), n, heads, dim // 2, int(interleaved))
    elif chosen == "triton" and x.stride(2) == 1:
        from .gpu import rope

        rope.rotate_(x, cos, sin, interleaved)
    else:
        x.copy_(rotate_reference(x, cos, sin, interleaved))
