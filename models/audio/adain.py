"""Layers of StyleTTS 2 (arXiv 2306.07691) whose scale and shift depend on the style of a voice (AdaIN, arXiv 1703.06868).

They see the whole time of an item, so that items cannot be computed in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.channel_norm import leaky_norm, snake_norm
from ..layers.basic import TensorModule, WeightedLayer
from ..layers.builder import Builder
from ..layers.convolution import LongConv1d, ShortConv1d, Upsample1d
from ..layers.linear import Linear

_EPS = 1e-5  # of layer norms
_SLOPE = 0.2


class ChannelFactors(WeightedLayer):
    """Factor and offset of each channel. They are 1 and 0 unless they are filled: some checkpoints do not store them."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self.weight, self.bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight
        yield f"{path}.bias", self.bias


class AdaptiveNorm(nn.Module):
    """Computes the scale and the shift of each channel after an instance norm over time, from a style `[1, style]`."""

    def __init__(self, channels: int, style: int, device: torch.device) -> None:
        super().__init__()
        self.norm = ChannelFactors(channels, device)
        self.fc = Linear(style, {"fc": 2 * channels}, True, torch.float32, device)

    def forward(self, style: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift, each `[channels]`."""
        scale, shift = self.fc(style)[0].chunk(2)
        scale = 1 + scale
        return scale * self.norm.weight, torch.addcmul(shift, scale, self.norm.bias)


class AdaptiveLayerNorm(TensorModule):
    """LayerNorm whose weight and bias depend on the style: `[time, channels]`."""

    def __init__(self, channels: int, style: int, device: torch.device) -> None:
        super().__init__()
        self.fc = Linear(style, {"fc": 2 * channels}, True, torch.float32, device)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale, shift = self.fc(style)[0].chunk(2)
        return F.layer_norm(x, x.shape[1:], 1 + scale, shift, _EPS)


class AdaptiveBlock(TensorModule):
    """Two convolutions after adaptive norms, with a residual; `doubles`: the result has twice the time."""

    def __init__(self, inner: int, outer: int, style: int, device: torch.device, doubles: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaptiveNorm(inner, style, device), AdaptiveNorm(outer, style, device)
        self.conv1, self.conv2 = ShortConv1d(inner, outer, 3, device), ShortConv1d(outer, outer, 3, device)
        self.pool = Upsample1d(inner, inner, 3, 2, device, groups=inner, weight_norm=True) if doubles else None
        self.conv1x1 = ShortConv1d(inner, outer, 1, device, bias=False) if inner != outer else None

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        y = leaky_norm(x, _SLOPE, *self.norm1(style))
        y = self.conv1(y if self.pool is None else self.pool(y))
        y = self.conv2(leaky_norm(y, _SLOPE, *self.norm2(style)))
        if self.pool is not None:
            x = x.repeat_interleave(2, 2)
        return y.add_(x if self.conv1x1 is None else self.conv1x1(x)).mul_(1 / sqrt(2))


class SnakeBlock(TensorModule):
    """Pairs of convolutions, the first one dilated, each after an adaptive norm and x + sin(a x)^2 / a, with residuals."""

    def __init__(self, channels: int, taps: int, dilations: Sequence[int], style: int, device: torch.device) -> None:
        super().__init__()
        count = range(len(dilations))
        self.convs1 = nn.ModuleList(LongConv1d(channels, channels, taps, device, dilation=dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(LongConv1d(channels, channels, taps, device) for _ in count)
        self.adain1 = nn.ModuleList(AdaptiveNorm(channels, style, device) for _ in count)
        self.adain2 = nn.ModuleList(AdaptiveNorm(channels, style, device) for _ in count)
        build = Builder(self, torch.float32, device)
        self.factors = [[build.stored(f"alpha{i}.{n}", 1, channels, 1) for n in count] for i in (1, 2)]

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        for number, (first, second) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            before, between = self.adain1[number], self.adain2[number]
            factor, other = (factors[number].weight.flatten() for factors in self.factors)
            y = first(snake_norm(x, factor, *before(style)))
            x = second(snake_norm(y, other, *between(style)), x)
        return x
