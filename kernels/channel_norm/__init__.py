"""Instance norm over time and the activation after it, as in adaptive norms (AdaIN, arXiv 1703.06868)."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import implementation

EPS = 1e-5


def leaky_norm(x: Tensor, slope: float, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise each channel of `x [1, channels, time]`, multiply by `scale` and add `shift [channels]`; then leaky ReLU."""
    normed: Tensor = implementation("channel_norm", x.device, x.dtype).leaky_norm(x, slope, scale, shift)
    return normed


def snake_norm(x: Tensor, factor: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute `leaky_norm` with snake (arXiv 2006.08195), y + sin(factor y)^2 / factor, as activation. `factor [channels]`."""
    normed: Tensor = implementation("channel_norm", x.device, x.dtype).snake_norm(x, factor, scale, shift)
    return normed
