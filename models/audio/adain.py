"""Layers of StyleTTS 2 (arXiv 2306.07691) whose scale and shift depend on the style of a voice (AdaIN, arXiv 1703.06868).

They see the whole time of an item, so that items cannot be computed in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.basic import TensorModule, WeightedLayer
from ..layers.builder import Builder
from ..layers.convolution import Conv1d, Upsample1d
from ..layers.linear import Linear

_EPS = 1e-5
_SLOPE = 0.2


class ChannelFactors(WeightedLayer):
    """Factor and offset of each channel. They are 1 and 0 unless they are filled: some checkpoints do not store them."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self.weight, self.bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight
        yield f"{path}.bias", self.bias


class AdaptiveNorm(TensorModule):
    """Instance norm over time, then a scale and a shift of each channel: `[1, channels, time]`, style `[1, style]`."""

    def __init__(self, channels: int, style: int, device: torch.device) -> None:
        super().__init__()
        self.norm = ChannelFactors(channels, device)
        self.fc = Linear(style, {"fc": 2 * channels}, True, torch.float32, device)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale, shift = self.fc(style)[0].chunk(2)
        scale = 1 + scale
        return F.instance_norm(x, weight=scale * self.norm.weight, bias=torch.addcmul(shift, scale, self.norm.bias), eps=_EPS)


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
        self.conv1 = Conv1d(inner, outer, 3, device, weight_norm=True)
        self.conv2 = Conv1d(outer, outer, 3, device, weight_norm=True)
        self.pool = Upsample1d(inner, inner, 3, 2, device, groups=inner, weight_norm=True) if doubles else None
        self.conv1x1 = Conv1d(inner, outer, 1, device, bias=False, weight_norm=True) if inner != outer else None

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        y = F.leaky_relu_(self.norm1(x, style), _SLOPE)
        y = self.conv1(y if self.pool is None else self.pool(y))
        y = self.conv2(F.leaky_relu_(self.norm2(y, style), _SLOPE))
        if self.pool is not None:
            x = x.repeat_interleave(2, 2)
        return y.add_(x if self.conv1x1 is None else self.conv1x1(x)).mul_(1 / sqrt(2))


class SnakeBlock(TensorModule):
    """Pairs of convolutions, the first one dilated, each after an adaptive norm and x + sin(a x)^2 / a, with residuals."""

    def __init__(self, channels: int, taps: int, dilations: Sequence[int], style: int, device: torch.device) -> None:
        super().__init__()
        count = range(len(dilations))
        self.convs1 = nn.ModuleList(
            Conv1d(channels, channels, taps, device, dilation=dilation, weight_norm=True) for dilation in dilations
        )
        self.convs2 = nn.ModuleList(Conv1d(channels, channels, taps, device, weight_norm=True) for _ in count)
        self.adain1 = nn.ModuleList(AdaptiveNorm(channels, style, device) for _ in count)
        self.adain2 = nn.ModuleList(AdaptiveNorm(channels, style, device) for _ in count)
        build = Builder(self, torch.float32, device)
        self.factors = [[build.stored(f"alpha{i}.{n}", 1, channels, 1) for n in count] for i in (1, 2)]

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        for number, (first, second) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            before, between = self.adain1[number], self.adain2[number]
            factor, other = (factors[number].weight for factors in self.factors)
            y = first(_snake_(before(x, style), factor))
            x = second(_snake_(between(y, style), other)).add_(x)
        return x


def _snake_(x: Tensor, factor: Tensor) -> Tensor:
    return x.add_((x * factor).sin_().square_().mul_(1 / factor))
