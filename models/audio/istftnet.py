"""iSTFTNet (arXiv 2203.02395) with a harmonic source (arXiv 1904.12088): features and a pitch curve become samples.

A source of sines, harmonics of the pitch, and of noise passes through the network's stages beside the features. The last layer
gives magnitude and phase of a short-time Fourier transform with few bins, whose inverse is the sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from ..layers.basic import TensorModule
from ..layers.convolution import Conv1d, Upsample1d
from ..layers.linear import Linear
from .adain import SnakeBlock

RATE = 24_000  # hertz
_HARMONICS = 9  # sines of the source, the first of them at the pitch
_AMPLITUDE, _NOISE = 0.1, 0.003  # of the sines, and of the noise beside them
_UNVOICED = 10.0  # hertz; lower pitches are noise
_ENDS = 7  # taps of the last convolution
_SOURCE_TAPS = (7, 11)  # of the blocks of the source, in all stages but the last, and in the last one
_SOURCE_DILATIONS = (1, 3, 5)


@dataclass(frozen=True)
class IstftNetSpec:
    """Sizes of the network.

    Args:
        channels: of the features; each stage halves them.
        strides, taps: of the transposed convolution of each stage.
        kernels: (taps, dilations) of the blocks of each stage, whose results are averaged.
        bins: window of the Fourier transform in samples. hop: samples from one window to the next.
    """

    channels: int
    strides: Sequence[int]
    taps: Sequence[int]
    kernels: Sequence[tuple[int, Sequence[int]]]
    bins: int
    hop: int

    @property
    def scale(self) -> int:
        """Samples per row of the features."""
        return prod(self.strides) * self.hop

    def peak_bytes(self, rows: int) -> int:
        """Return the bytes alive in the stage with the most numbers: results of its blocks, and their temporaries."""
        rate, widest = rows, 0
        for number, stride in enumerate(self.strides):
            rate *= stride
            widest = max(widest, (rate + 1) * (self.channels >> number + 1))
        source = rows * self.scale * _HARMONICS  # of which several copies are alive while the source is made
        spectrum = (rate + 1) * (self.bins + 2)
        return 4 * (max(7 * widest, 6 * source) + 2 * spectrum)


def istftnet_spec(config: Mapping[str, Any]) -> IstftNetSpec:
    """Read `istftnet`. Raise ConfigError for lists that differ in length, and sizes that do not fit together."""
    names = ("upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes", "resblock_dilation_sizes")
    strides, taps, kernels, dilations = (list(require(config, name)) for name in names)
    channels, bins = positive_int(config, "upsample_initial_channel"), positive_int(config, "gen_istft_n_fft")
    if not strides or len(strides) != len(taps) or not kernels or len(kernels) != len(dilations):
        raise ConfigError(f"the lists {', '.join(names)} of istftnet in config.json must have entries, as many in each pair")
    if channels % 2 ** len(strides) or any((k - s) % 2 or k < s for k, s in zip(taps, strides, strict=True)) or bins % 2:
        raise ConfigError("sizes of istftnet in config.json do not fit together")
    if not all(isinstance(kernel, int) and kernel > 0 and kernel % 2 for kernel in kernels):
        raise ConfigError("resblock_kernel_sizes of istftnet in config.json must be odd")
    hop = positive_int(config, "gen_istft_hop_size")
    return IstftNetSpec(channels, strides, taps, list(zip(kernels, dilations, strict=True)), bins, hop)


class HarmonicSource(TensorModule):
    """A pitch curve in hertz `[rows]`, one value every `scale` samples -> the source, float32 `[rows * scale]`."""

    def __init__(self, scale: int, device: torch.device) -> None:
        super().__init__()
        self.scale = scale
        self.l_linear = Linear(_HARMONICS, {"l_linear": 1}, True, torch.float32, device)

    def forward(self, pitch: Tensor, noise: torch.Generator) -> Tensor:
        """Compute the source. `noise`: draws the same numbers as the published code after `torch.manual_seed`."""
        harmonics = torch.arange(1, _HARMONICS + 1, dtype=torch.float32, device=pitch.device)
        turns = pitch[None, :, None] * harmonics / RATE % 1  # of each sine per sample, [1, rows, harmonics]
        phase = (turns.cumsum(1) * 2 * pi).transpose(1, 2) * self.scale
        sines = F.interpolate(phase, scale_factor=self.scale, mode="linear").sin_().mul_(_AMPLITUDE)[0].T
        torch.rand(1, _HARMONICS, generator=noise)  # the phase in which sines begin, which the published code does not use
        random = torch.empty(1, *sines.shape[::-1]).mT.normal_(generator=noise)[0].to(pitch.device)  # in the order of memory
        voiced = (pitch > _UNVOICED).float().repeat_interleave(self.scale)[:, None]
        amplitude = voiced * _NOISE + (1 - voiced) * _AMPLITUDE / 3
        source: Tensor = self.l_linear(torch.addcmul(amplitude * random, sines, voiced))
        return source[:, 0].tanh_()


class IstftNet(nn.Module):
    """Features `[1, channels, rows]`, a style and a pitch curve `[rows]` -> samples, float32 `[rows * scale]`."""

    def __init__(self, spec: IstftNetSpec, style: int, device: torch.device) -> None:
        super().__init__()
        self.spec, channels, rate, bins = spec, spec.channels, spec.scale // spec.hop, spec.bins + 2
        self.m_source = HarmonicSource(spec.scale, device)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        self.noise_convs, self.noise_res = nn.ModuleList(), nn.ModuleList()
        for stride, taps in zip(spec.strides, spec.taps, strict=True):
            self.ups.append(Upsample1d(channels, channels // 2, taps, stride, device, weight_norm=True))
            channels, rate = channels // 2, rate // stride
            source = (2 * rate, rate, (rate + 1) // 2) if rate > 1 else (1, 1, 0)  # taps, stride, zeros at each end
            self.noise_convs.append(Conv1d(bins, channels, source[0], device, stride=source[1], zeros=source[2]))
            self.noise_res.append(SnakeBlock(channels, _SOURCE_TAPS[rate == 1], _SOURCE_DILATIONS, style, device))
            self.resblocks.extend(SnakeBlock(channels, kernel, dilations, style, device) for kernel, dilations in spec.kernels)
        self.conv_post = Conv1d(channels, bins, _ENDS, device, weight_norm=True)

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor, noise: torch.Generator) -> Tensor:
        spec, window = self.spec, torch.hann_window(self.spec.bins, device=x.device)
        spectrum = torch.stft(self.m_source(pitch, noise)[None], spec.bins, spec.hop, window=window, return_complex=True)
        source = torch.cat((spectrum.abs(), spectrum.angle()), 1)
        count = len(spec.kernels)
        for number, (up, convolution, residual) in enumerate(zip(self.ups, self.noise_convs, self.noise_res, strict=True), 1):
            blocks = self.resblocks[(number - 1) * count : number * count]
            beside = residual(convolution(source), style)
            x = up(F.leaky_relu_(x, 0.1))
            if number == len(spec.strides):
                x = F.pad(x, (1, 0), "reflect")
            x = x.add_(beside)
            del beside
            total = blocks[0](x, style)
            for block in blocks[1:]:
                total.add_(block(x, style))
            x = total.div_(len(blocks))
        logarithm, phase = self.conv_post(F.leaky_relu_(x)).chunk(2, 1)
        spectrum = torch.polar(logarithm.exp_(), phase.sin_())
        return torch.istft(spectrum, spec.bins, spec.hop, window=window)[0]
