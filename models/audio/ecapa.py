"""ECAPA-TDNN (arXiv 2005.07143): a reference spectrogram becomes a vector of its speaker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from ..layers.basic import TensorModule
from ..layers.convolution import Conv1d

_VARIANCE = 1e-12  # the least


@dataclass(frozen=True)
class EcapaSpec:
    """Sizes of the encoder.

    Args:
        mels: bands of the spectrogram. out: length of the vector.
        channels, taps, dilations: of the first convolution, of each block, and of the last convolution.
        parts: groups of channels in a block, each of which is added to the next one. squeezed: width of a block's gate.
        attention: width of the pooling's attention.
    """

    mels: int
    out: int
    channels: Sequence[int]
    taps: Sequence[int]
    dilations: Sequence[int]
    parts: int
    squeezed: int
    attention: int


def ecapa_spec(config: Mapping[str, Any]) -> EcapaSpec:
    """Read the keys `enc_*`. Raise ConfigError if the lists differ in length or a channel count cannot be divided."""
    lists = [list(require(config, f"enc_{name}")) for name in ("channels", "kernel_sizes", "dilations")]
    sizes = [positive_int(config, f"enc_{name}") for name in ("res2net_scale", "se_channels", "attention_channels")]
    if len({len(numbers) for numbers in lists}) != 1 or len(lists[0]) < 3:
        raise ConfigError(
            "enc_channels, enc_kernel_sizes and enc_dilations in config.json must have the same length, 3 or above"
        )
    *blocks, last = lists[0]
    if len(set(blocks)) != 1 or sum(blocks[1:]) != last or blocks[0] % sizes[0]:
        reason = f"must be equal numbers, multiples of enc_res2net_scale {sizes[0]}, and the sum of those after the first"
        raise ConfigError(f"enc_channels in config.json is {lists[0]}; it {reason}")
    channels, taps, dilations = lists
    mels, out, (parts, squeezed, attention) = positive_int(config, "mel_dim"), positive_int(config, "enc_dim"), sizes
    return EcapaSpec(mels, out, channels, taps, dilations, parts=parts, squeezed=squeezed, attention=attention)


class _Convolution(TensorModule):
    """A convolution and ReLU."""

    def __init__(self, inner: int, outer: int, taps: int, dilation: int, device: torch.device) -> None:
        super().__init__()
        self.conv = Conv1d(inner, outer, taps, device, dilation=dilation, pad="reflect")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu_()


class _Groups(TensorModule):
    """Convolutions of groups of channels; the result of each is added to the next group. The first group is unchanged."""

    def __init__(self, channels: int, parts: int, taps: int, dilation: int, device: torch.device) -> None:
        super().__init__()
        self.parts, each = parts, channels // parts
        self.blocks = nn.ModuleList(_Convolution(each, each, taps, dilation, device) for _ in range(parts - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = x.chunk(self.parts, 1)
        done = [first]
        for block, part in zip(self.blocks, others, strict=True):
            done.append(block(part if len(done) == 1 else part + done[-1]))
        return torch.cat(done, 1)


class _Gate(TensorModule):
    """Weighs channels by a function of their means over time."""

    def __init__(self, channels: int, squeezed: int, device: torch.device) -> None:
        super().__init__()
        self.conv1, self.conv2 = Conv1d(channels, squeezed, 1, device), Conv1d(squeezed, channels, 1, device)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv2(self.conv1(x.mean(2, keepdim=True)).relu_()).sigmoid_()


class _TdnnBlock(TensorModule):
    def __init__(self, channels: int, spec: EcapaSpec, taps: int, dilation: int, device: torch.device) -> None:
        super().__init__()
        self.tdnn1 = _Convolution(channels, channels, 1, 1, device)
        self.res2net_block = _Groups(channels, spec.parts, taps, dilation, device)
        self.tdnn2 = _Convolution(channels, channels, 1, 1, device)
        self.se_block = _Gate(channels, spec.squeezed, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x)))) + x


class _Pooling(TensorModule):
    """Mean and standard deviation of each channel, `[1, channels, time] -> [1, 2 * channels, 1]`, weighed by attention."""

    def __init__(self, channels: int, attention: int, device: torch.device) -> None:
        super().__init__()
        self.tdnn = _Convolution(3 * channels, attention, 1, 1, device)
        self.conv = Conv1d(attention, channels, 1, device)

    def forward(self, x: Tensor) -> Tensor:
        plain = [part.expand_as(x) for part in _moments(x, torch.full_like(x, 1 / x.shape[2]))]
        weights = self.conv(self.tdnn(torch.cat((x, *plain), 1)).tanh_()).softmax(2)
        return torch.cat(_moments(x, weights), 1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation over time, with the weights."""
    mean = (weights * x).sum(2, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(2, keepdim=True).clamp(min=_VARIANCE).sqrt()


class EcapaEncoder(TensorModule):
    """`[1, frames, mels] -> [1, out]`, float32."""

    def __init__(self, spec: EcapaSpec, device: torch.device) -> None:
        super().__init__()
        first, *inner, last = zip(spec.channels, spec.taps, spec.dilations, strict=True)
        blocks: list[TensorModule] = [_Convolution(spec.mels, *first, device)]
        blocks += [_TdnnBlock(channels, spec, taps, dilation, device) for channels, taps, dilation in inner]
        self.blocks = nn.ModuleList(blocks)
        self.mfa = _Convolution(last[0], *last, device)
        self.asp = _Pooling(last[0], spec.attention, device)
        self.fc = Conv1d(2 * last[0], spec.out, 1, device)

    def forward(self, mel: Tensor) -> Tensor:
        x, outputs = mel.transpose(1, 2), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs[1:], 1))))[..., 0]
