"""BigVGAN (arXiv 2206.04658): a log-mel spectrogram becomes samples.

Every layer sees a bounded time, so that a long spectrogram is computed in parts with some frames around them, and the samples
are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, pi, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.convolution import Conv1d, Upsample1d

PART = 256  # frames that are computed at once, without those around them
_TAPS, _ENDS = 12, 7  # taps of the filters around an activation; taps of the first and last convolution
_ACTIVATION = 7  # samples that an activation reads on each side, through the filters that double and halve the rate
_DECIBELS, _REFERENCE = -115.0, 20.0
_NOT_ZERO = 1e-9


@dataclass(frozen=True)
class BigVganSpec:
    """Sizes of the network.

    Args:
        mels: bands of the spectrogram. channels: after the first convolution; each stage halves them.
        strides, taps: of the transposed convolution of each stage.
        kernels: (taps, dilations) of the blocks of each stage, whose results are averaged.
    """

    mels: int
    channels: int
    strides: Sequence[int]
    taps: Sequence[int]
    kernels: Sequence[tuple[int, Sequence[int]]]

    @property
    def samples_per_frame(self) -> int:
        return prod(self.strides)

    @property
    def around(self) -> int:
        """Frames on each side that a sample depends on, at most."""
        rate, frames = 1, float(_ENDS // 2)
        for stride, taps in zip(self.strides, self.taps, strict=True):
            frames += ceil(taps / stride) / rate
            rate *= stride
            sides = [len(d) * (taps // 2 + 2 * _ACTIVATION) + taps // 2 * sum(d) for taps, d in self.kernels]
            frames += max(sides) / rate
        return ceil(frames + (_ACTIVATION + _ENDS // 2) / rate)

    def peak_bytes(self) -> int:
        """Return the bytes alive while a part is computed: results of a stage's blocks, and temporaries of twice the rate."""
        rate, widest = 1, 0
        for number, stride in enumerate(self.strides):
            rate *= stride
            widest = max(widest, rate * (self.channels >> number + 1))
        return (30 + 4 * len(self.kernels)) * (PART + 2 * self.around) * widest * 4

    @property
    def kept_bytes(self) -> int:
        """Bytes that live between two parts: the last one, and the frames around the next one."""
        return (PART + 2 * self.around) * (self.samples_per_frame + 2 * self.mels) * 4


def bigvgan_spec(config: Mapping[str, Any]) -> BigVganSpec:
    """Read `bigvgan_config`. Raise ConfigError for lists that differ in length, and channels that cannot be halved."""
    names = ("upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes", "resblock_dilation_sizes")
    strides, taps, kernels, dilations = (list(require(config, name)) for name in names)
    channels = positive_int(config, "upsample_initial_channel")
    if not len(strides) == len(taps) or not kernels or len(kernels) != len(dilations) or not strides:
        raise ConfigError(
            f"the lists {', '.join(names)} of bigvgan_config in config.json must have entries, as many in each pair"
        )
    if channels % 2 ** len(strides) or any((k - s) % 2 or k < s for k, s in zip(taps, strides, strict=True)):
        raise ConfigError(
            "upsample_initial_channel, upsample_rates and upsample_kernel_sizes in config.json do not fit together"
        )
    return BigVganSpec(positive_int(config, "mel_dim"), channels, strides, taps, list(zip(kernels, dilations, strict=True)))


def low_pass(taps: int = _TAPS) -> Tensor:
    """Return the filter that keeps half of the band, float32 `[1, 1, taps]`: a sinc in a Kaiser window, of sum 1."""
    half, cutoff, width = taps // 2, 0.25, 0.3
    attenuation = 2.285 * (half - 1) * pi * 4 * width + 7.95
    beta = (
        0.1102 * (attenuation - 8.7) if attenuation > 50 else 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    )
    window = torch.kaiser_window(taps, periodic=False, beta=beta)
    sinc = 2 * cutoff * window * torch.sinc(2 * cutoff * (torch.arange(-half, half) + 0.5))
    return (sinc / sinc.sum())[None, None]


class SnakeBeta(TensorModule):
    """x + sin(a x)^2 / b with a and b of each channel, which are stored as logarithms. `[1, channels, time]`."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, torch.float32, device)
        self.factors = [build.stored(name, channels) for name in ("alpha", "beta")]

    def forward(self, x: Tensor) -> Tensor:
        a, b = (factor.weight.exp()[:, None] for factor in self.factors)
        return x + (x * a).sin_().square_().mul_(1.0 / (b + _NOT_ZERO))


class _Activation(TensorModule):
    """SnakeBeta at twice the rate, between two low-pass filters."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self.act = SnakeBeta(channels, device)

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        channels, kernel = x.shape[1], kernel.expand(x.shape[1], -1, -1)
        edge = _TAPS // 2 - 1
        wide = 2 * F.conv_transpose1d(F.pad(x, (edge, edge), "replicate"), kernel, stride=2, groups=channels)
        wide = self.act(wide[..., 3 * edge : -3 * edge])
        return F.conv1d(F.pad(wide, (edge, edge + 1), "replicate"), kernel, stride=2, groups=channels)


class _ResidualBlock(TensorModule):
    """Pairs of convolutions, the first dilated, each after an activation, with residuals."""

    def __init__(self, channels: int, taps: int, dilations: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(Conv1d(channels, channels, taps, device, dilation=dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(Conv1d(channels, channels, taps, device) for _ in dilations)
        self.activations = nn.ModuleList(_Activation(channels, device) for _ in range(2 * len(dilations)))

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        acts = self.activations
        for first, second, before, between in zip(self.convs1, self.convs2, acts[::2], acts[1::2], strict=True):
            x = x + second(between(first(before(x, kernel)), kernel))
        return x


class BigVgan(nn.Module):
    """Log-mel frames `[frames, mels]` -> samples in [-1, 1], float32 `[frames * samples_per_frame]`."""

    def __init__(self, spec: BigVganSpec, device: torch.device) -> None:
        super().__init__()
        self.spec, channels = spec, spec.channels
        self.conv_pre = Conv1d(spec.mels, channels, _ENDS, device)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        self.stages = list[tuple[Upsample1d, list[_ResidualBlock]]]()  # the layers of both
        for stride, taps in zip(spec.strides, spec.taps, strict=True):
            up = Upsample1d(channels, channels // 2, taps, stride, device)
            channels //= 2
            blocks = [_ResidualBlock(channels, kernel, dilations, device) for kernel, dilations in spec.kernels]
            self.stages.append((up, blocks))
            self.ups.append(nn.ModuleList([up]))
            self.resblocks.extend(blocks)
        self.activation_post = _Activation(channels, device)
        self.conv_post = Conv1d(channels, 1, _ENDS, device, bias=False)

    def parts(self, spectrograms: Iterable[tuple[Tensor, bool]]) -> Iterator[Tensor]:
        """Yield the samples of consecutive spectrograms in parts, as soon as the frames around them are known.

        Args:
            spectrograms: `[frames, mels]`, and whether it is the last one.
        """
        around, rate, start = self.spec.around, self.spec.samples_per_frame, 0
        # frames whose samples are still needed. Frame `start` is the next to become sound; up to `around` frames before it stay
        mel: Tensor | None = None
        for frames, last in spectrograms:
            mel = frames if mel is None else torch.cat((mel, frames))
            while start < (end := len(mel) - (0 if last else around)):
                stop = min(start + PART, end)
                wave = self._synthesize(mel[: stop + around])
                yield wave[start * rate : stop * rate]
                mel, start = mel[max(0, stop - around) :], min(stop, around)

    def _synthesize(self, mel: Tensor) -> Tensor:
        kernel = low_pass().to(mel.device)
        least = 10.0 ** (_DECIBELS / 20)
        decibels = 20 * mel.exp().clamp(min=least).log10() - _REFERENCE
        x = self.conv_pre((2 * (decibels - _DECIBELS) / -_DECIBELS - 1).clamp(-1, 1).T[None])
        for up, blocks in self.stages:
            x = up(x)
            x = torch.stack([block(x, kernel) for block in blocks]).mean(0)
        return self.conv_post(self.activation_post(x, kernel)).clamp(-1, 1).flatten()
