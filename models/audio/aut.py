"""The packed AuT encoder: log-mel frames of items of many requests in one call.

Frames are split into chunks of a second. Three convolutions over time and mel bands downsample a chunk to 13 rows, each chunk
with its own positions. Attention is within windows of several chunks.

Source: arXiv 2509.17765, section 2.2, and the config's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int
from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import Norm
from ..layers.linear import Linear
from ..memory_formulas import SMALL, OpBytes
from .mel_encoder import MelEncoderLayer, MelEncoderSpec, attention_tiles, mel_encoder_spec, mel_layer_bytes, sinusoids

_EPS = 1e-5
CONV_BATCH = 8  # chunks per convolution call: the unfolded input is 9 times as large as the chunks


@dataclass(frozen=True)
class AutSpec:
    """The AuT encoder.

    Args:
        layer: the transformer layers.
        channels: channels of the convolutions.
        chunk, window: lengths in frames.
        out: numbers per result row.
        pad_short: an item shorter than a chunk is padded to a whole chunk, like the last chunk of longer items.
    """

    layer: MelEncoderSpec
    channels: int
    chunk: int
    window: int
    out: int
    pad_short: bool = True

    def rows(self, frames: int) -> int:
        """Return the number of rows of an item."""
        chunks, rest = divmod(frames, self.chunk)
        return chunks * downsampled(self.chunk) + downsampled(rest)

    def windows(self, frames: int) -> list[int]:
        """Return the rows of each attention window of an item."""
        size, rows = self.window // self.chunk * downsampled(self.chunk), self.rows(frames)
        return [size] * (rows // size) + ([rows % size] if rows % size else [])


def downsampled(frames: int) -> int:
    """Return the number of rows after three convolutions of stride 2."""
    return -(-frames // 8)


def aut_spec(audio: Mapping[str, Any]) -> AutSpec:
    """Read the raw `audio_config`.

    Raises:
        ConfigError: a key is missing, the activation is unknown, or a width does not divide by its heads or a window by chunks.
    """
    chunk, window = 2 * positive_int(audio, "n_window"), positive_int(audio, "n_window_infer")
    if window % chunk:
        raise ConfigError(f"n_window_infer {window} of the audio config is not a multiple of {chunk}")
    layer = replace(mel_encoder_spec({**audio, "max_source_positions": downsampled(chunk)}), key_bias=True)
    return AutSpec(layer, positive_int(audio, "downsample_hidden_size"), chunk, window, positive_int(audio, "output_dim"))


class AutEncoder(nn.Module):
    """Log-mel frames of items, concatenated -> `[rows, out]` per item."""

    __call__: Callable[..., list[Tensor]]

    def __init__(self, spec: AutSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, c = spec, dtype, spec.layer
        channels = spec.channels
        self.convolutions = []
        for name, inner in (("conv2d1", 1), ("conv2d2", channels), ("conv2d3", channels)):
            layer = Linear(9 * inner, {name: channels}, True, dtype, device)
            self.add_module(name, layer)
            self.convolutions.append(layer)
        self.join = Linear(channels * downsampled(c.mels), {"conv_out": c.width}, False, dtype, device)
        self.positions = sinusoids(c.positions, c.width).to(device, dtype)
        self.layers = nn.ModuleList(MelEncoderLayer(c, dtype, device) for _ in range(c.layers))
        self.ln_post = Norm(c.width, _EPS, True, dtype, device)
        self.first = Linear(c.width, {"proj1": c.width}, True, dtype, device)
        self.second = Linear(c.width, {"proj2": spec.out}, True, dtype, device)

    def _max_frames(self, rows: int) -> int:
        """Return an upper bound of the frames of items with `rows` rows in total."""
        return -(-rows * self.spec.chunk // downsampled(self.spec.chunk))

    def input_bytes(self, rows: int) -> int:
        return self._max_frames(rows) * self.spec.layer.mels * self.dtype.itemsize

    def encoder_bytes(self, rows: int, limits: StepLimits) -> int:
        return aut_bytes(self.spec, self._max_frames(rows), self.dtype, limits)

    def forward(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """Encode `features` `[frames, mels]`, the frames of all items; `frames`: number of frames of each item."""
        spec, rows = self.spec, [self.spec.rows(n) for n in frames]
        x = torch.cat([self._rows(piece, n) for piece, n in zip(features.split(list(frames)), rows, strict=True)])
        windows = [length for n in frames for length in spec.windows(n)]
        for layer in self.layers:
            x = layer(x, windows)
        out = self.second(activation(spec.layer.act, self.first(self.ln_post(x))))
        return list(out.split(rows))

    def _rows(self, features: Tensor, rows: int) -> Tensor:
        """Encode one item `[frames, mels]` -> `[rows, width]` before the layers; the last chunk is padded with zeros."""
        chunk = self.spec.chunk if self.spec.pad_short else min(self.spec.chunk, len(features))
        padding = -len(features) % chunk
        chunks = F.pad(features.to(self.dtype), (0, 0, 0, padding)).view(-1, chunk, self.spec.layer.mels)
        return torch.cat([self._convolved(part) for part in chunks.split(CONV_BATCH)])[:rows]

    def _convolved(self, chunks: Tensor) -> Tensor:
        """Convolve `[chunks, frames, mels]` -> `[chunks * rows, width]` and add positions."""
        x = chunks.transpose(1, 2)[..., None]  # [chunks, bands, time, channels]
        for layer in self.convolutions:
            windows = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2)  # [chunks, bands, time, channels, 3, 3]
            shape = windows.shape[:3]
            x = activation("gelu", layer(windows.reshape(-1, 9 * x.shape[3]))).view(*shape, -1)
        joined = self.join(x.permute(0, 2, 3, 1).reshape(x.shape[0] * x.shape[2], -1))
        positioned = joined.view(x.shape[0], x.shape[2], -1) + self.positions[: x.shape[2]]
        return positioned.flatten(0, 1)


def aut_bytes(c: AutSpec, frames: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in AutEncoder for `frames` frames in one call, features included."""
    ops = OpBytes(dtype, limits)
    s, layer, channels = dtype.itemsize, c.layer, c.channels
    mels, row, rows = layer.mels * s, layer.width * s, c.rows(frames)
    padded = -(-frames // c.chunk) * c.chunk
    bands, batch = -(-layer.mels // 2), min(padded, CONV_BATCH * c.chunk)  # after the first convolution; frames per call
    outputs = bands * batch // 2  # of one channel, after the first convolution
    unfolded = (bands + 2) * (batch // 2 + 2 * batch // c.chunk) + 9 * -(-outputs // 4)  # zero-padded, then in windows of 9
    first = batch * mels * 9 // 8 + outputs * (9 * s + ops.linear(9, channels, outputs) + channels * s)
    second = channels * s * (outputs + unfolded)
    second += outputs // 4 * (ops.linear(9 * channels, channels, outputs // 4) + channels * s)
    layers, end = mel_layer_bytes(layer, rows, ops), 3 * row + 2 * c.out * s
    base = SMALL + frames * mels + attention_tiles(c.layer, rows, ops)
    return base + max(padded * mels + rows * row + max(first, second), rows * max(layers, end))
