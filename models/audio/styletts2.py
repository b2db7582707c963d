"""StyleTTS 2 (arXiv 2306.07691) without its diffusion of styles: phonemes and the style of a voice become samples.

A text encoder describes how phonemes sound, a predictor how long each one is, and the curves of pitch and energy. The decoder
makes features of these, and an iSTFTNet samples. All layers but the first decide over the whole time of an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from ..layers.basic import EmbeddingTable, TensorModule, WeightedLayer
from ..layers.convolution import Conv1d
from ..layers.linear import Linear
from .adain import AdaptiveBlock, AdaptiveLayerNorm
from .istftnet import IstftNet, IstftNetSpec, istftnet_spec
from .lstm import BidirectionalLstm

_DECODER_WIDTH, _TEXT_WIDTH = 1024, 64  # of the decoder, and of the text that its blocks read again
_EPS, _SLOPE = 1e-5, 0.2


@dataclass(frozen=True)
class StyleTts2Spec:
    """Sizes of the model.

    Args:
        phonemes: entries of the table.
        width: of the text's features. layers: of text encoder and predictor. taps: of the text encoder's convolutions.
        style: numbers of a style; there is one for the sound and one for the prosody.
        max_frames: frames of a phoneme at most. A frame is 2 rows of the iSTFTNet.
    """

    phonemes: int
    width: int
    layers: int
    taps: int
    style: int
    max_frames: int
    wave: IstftNetSpec

    @property
    def samples_per_frame(self) -> int:
        return 2 * self.wave.scale

    def peak_bytes(self, phonemes: int, frames: int) -> int:
        """Return the bytes of memory in use while this many phonemes are turned into this many frames."""
        text = 4 * phonemes * (8 * self.width + 2 * self.style + self.max_frames)
        decoder = 4 * 2 * frames * 5 * (_DECODER_WIDTH + _TEXT_WIDTH + 2)
        return text + max(decoder, self.wave.peak_bytes(2 * frames) + 4 * 2 * frames * self.wave.channels)


def styletts2_spec(config: Mapping[str, Any]) -> StyleTts2Spec:
    """Read config.json. Raise ConfigError for missing values, and sizes that do not fit together."""
    names = ("n_token", "hidden_dim", "n_layer", "text_encoder_kernel_size", "style_dim", "max_dur")
    phonemes, width, layers, taps, style, longest = (positive_int(config, name) for name in names)
    wave = istftnet_spec(require(config, "istftnet"))
    if width % 2 or taps % 2 == 0:
        raise ConfigError("hidden_dim and text_encoder_kernel_size in config.json must be even and odd")
    return StyleTts2Spec(phonemes, width, layers, taps, style, longest, wave)


class _ChannelNorm(WeightedLayer):
    """LayerNorm over the channels of `[1, channels, time]`."""

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self.weight, self.bias = torch.empty(channels, device=device), torch.empty(channels, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.gamma", self.weight
        yield f"{path}.beta", self.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.mT, self.weight.shape, self.weight, self.bias, _EPS).mT


class PhonemeEncoder(TensorModule):
    """Phonemes `[time]` -> features `[time, width]`."""

    def __init__(self, spec: StyleTts2Spec, device: torch.device) -> None:
        super().__init__()
        self.embedding = EmbeddingTable(spec.phonemes, spec.width, torch.float32, device)
        self.cnn = nn.ModuleList(
            nn.ModuleList(
                (Conv1d(spec.width, spec.width, spec.taps, device, weight_norm=True), _ChannelNorm(spec.width, device))
            )
            for _ in range(spec.layers)
        )
        self.lstm = BidirectionalLstm(spec.width, spec.width, device)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).T[None]
        for layers in self.cnn:
            convolution, norm = layers.children()
            x = F.leaky_relu(norm(convolution(x)), _SLOPE)
        return self.lstm(x[0].T)


class DurationEncoder(TensorModule):
    """Features of phonemes `[time, width]` -> `[time, width + style]`; the style is appended to each row."""

    def __init__(self, spec: StyleTts2Spec, device: torch.device) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(
            layer
            for _ in range(spec.layers)
            for layer in (
                BidirectionalLstm(spec.width + spec.style, spec.width, device),
                AdaptiveLayerNorm(spec.width, spec.style, device),
            )
        )

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        styles = style.expand(len(x), -1)
        x = torch.cat((x, styles), 1)
        for lstm, norm in zip(self.lstms[::2], self.lstms[1::2], strict=True):
            x = torch.cat((norm(lstm(x), style), styles), 1)
        return x


class _DurationProjection(TensorModule):
    def __init__(self, width: int, frames: int, device: torch.device) -> None:
        super().__init__()
        self.linear_layer = Linear(width, {"linear_layer": frames}, True, torch.float32, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_layer(x)


class ProsodyPredictor(nn.Module):
    """Features of phonemes and a style -> their durations, then the curves of pitch and energy."""

    def __init__(self, spec: StyleTts2Spec, device: torch.device) -> None:
        super().__init__()
        width, style, inner = spec.width, spec.style, spec.width + spec.style
        self.text_encoder = DurationEncoder(spec, device)
        self.lstm, self.shared = BidirectionalLstm(inner, width, device), BidirectionalLstm(inner, width, device)
        self.duration_proj = _DurationProjection(width, spec.max_frames, device)
        for name in ("F0", "N"):
            blocks = (
                AdaptiveBlock(width, width, style, device),
                AdaptiveBlock(width, width // 2, style, device, doubles=True),
                AdaptiveBlock(width // 2, width // 2, style, device),
            )
            setattr(self, name, nn.ModuleList(blocks))
            setattr(self, f"{name}_proj", Conv1d(width // 2, 1, 1, device))

    def durations(self, encoded: Tensor) -> Tensor:
        """Return the frames of each phoneme before rounding, float32 `[time]`, for what `text_encoder` returned."""
        return self.duration_proj(self.lstm(encoded)).sigmoid_().sum(1)

    def curves(self, frames: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        """Return pitch in hertz and energy, `[2 * frames]`, for what `text_encoder` returned, repeated to `[frames, ...]`."""
        x = self.shared(frames).T[None]
        return self._curve("F0", x, style), self._curve("N", x, style)

    def _curve(self, name: str, x: Tensor, style: Tensor) -> Tensor:
        for block in self.get_submodule(name).children():
            x = block(x, style)
        curve: Tensor = self.get_submodule(f"{name}_proj")(x)
        return curve[0, 0]


class StyleDecoder(nn.Module):
    """Features `[frames, width]`, curves and a style -> samples, float32 `[frames * samples_per_frame]`."""

    def __init__(self, spec: StyleTts2Spec, device: torch.device) -> None:
        super().__init__()
        style, width, joined = spec.style, _DECODER_WIDTH, _DECODER_WIDTH + _TEXT_WIDTH + 2
        self.encode = AdaptiveBlock(spec.width + 2, width, style, device)
        self.decode = nn.ModuleList(
            (
                *(AdaptiveBlock(joined, width, style, device) for _ in range(3)),
                AdaptiveBlock(joined, spec.wave.channels, style, device, doubles=True),
            )
        )
        self.F0_conv, self.N_conv = (Conv1d(1, 1, 3, device, stride=2, weight_norm=True) for _ in range(2))
        self.asr_res = nn.ModuleList((Conv1d(spec.width, _TEXT_WIDTH, 1, device, weight_norm=True),))
        self.generator = IstftNet(spec.wave, style, device)

    def forward(self, frames: Tensor, pitch: Tensor, energy: Tensor, style: Tensor, noise: torch.Generator) -> Tensor:
        text, curves = frames.T[None], (self.F0_conv(pitch[None, None]), self.N_conv(energy[None, None]))
        x, text = self.encode(torch.cat((text, *curves), 1), style), self.asr_res[0](text)
        for block in self.decode:
            x = block(torch.cat((x, text, *curves), 1), style)
        samples: Tensor = self.generator(x, style, pitch, noise)
        return samples
