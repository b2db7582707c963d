"""Instance norm over time with an activation, in C++. It takes a third of the time of torch, mostly for the sines of snake."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import call
from . import EPS

_LEAKY, _SNAKE = 1, 2  # enum of the C++ kernel


def leaky_norm(x: Tensor, slope: float, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `channel_norm.leaky_norm`."""
    return _normed(_LEAKY, x, scale, shift, None, slope)


def snake_norm(x: Tensor, factor: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `channel_norm.snake_norm`."""
    return _normed(_SNAKE, x, scale, shift, factor.contiguous(), 0.0)


def _normed(kind: int, x: Tensor, scale: Tensor, shift: Tensor, factor: Tensor | None, slope: float) -> Tensor:
    x, (channels, time) = x.contiguous(), x.shape[1:]
    out = torch.empty_like(x)
    call("channel_norm", x.dtype, kind, x, scale.contiguous(), shift.contiguous(), factor, out, channels, time, EPS, slope)
    return out
