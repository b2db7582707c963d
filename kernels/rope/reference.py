"""Rotary embedding in torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Compute `rope.rotate_`."""
    x.copy_(rotate_reference(x, cos, sin, interleaved))
