"""Instance norm over time with an activation, in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from . import EPS


def leaky_norm(x: Tensor, slope: float, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `channel_norm.leaky_norm`."""
    return F.leaky_relu_(F.instance_norm(x, weight=scale, bias=shift, eps=EPS), slope)


def snake_norm(x: Tensor, factor: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `channel_norm.snake_norm`."""
    y, factor = F.instance_norm(x, weight=scale, bias=shift, eps=EPS), factor[:, None]
    return y.add_((y * factor).sin_().square_().mul_(1 / factor))
