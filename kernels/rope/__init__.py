"""Rotary embedding: cosines and sines once per step, rotation in every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import implementation


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


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Rotate `x [rows, heads, dim]` in place by float32 `cos, sin [rows, dim / 2]`. Rows and heads of x may be strided.

    A pair is (i, i + dim / 2) or, if `interleaved`, (2i, 2i + 1).
    """
    implementation("rotary", x.device, x.dtype, x.shape[2]).rotate_(x, cos, sin, interleaved)
