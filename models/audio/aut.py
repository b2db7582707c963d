"""The packed AuT encoder: log-mel frames of items of many requests in one call. Knows no family.

Frames are cut into chunks of a second, which three convolutions over time and bands make to 13 rows, with positions counted
anew in each; attention sees windows of several chunks.

Source: arXiv 2509.17765, section 2.2, and the config's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from ...mm.errors import ConfigError
from ..config import count
from ..layers.basic import Norm
from ..layers.linear import Linear
from .mel_encoder import EncoderConfig, Layer, encoder_config

_EPS = 1e-5
_TIMESCALE = 10_000.0  # between the fastest and the slowest sinusoid
AT_ONCE = 8  # chunks that go through the convolutions together: their windows are 9 times as large as they are


@dataclass(frozen=True)
class AutSpec:
    """`layer`: of the stack; `channels`: of the convolutions; `chunk`, `window`: frames; `out`: width of the rows.

    `filled`: a sound that is shorter than a chunk is filled up to one, as the last chunk of longer ones always is.
    """

    layer: EncoderConfig
    channels: int
    chunk: int
    window: int
    out: int
    filled: bool = True

    def rows(self, frames: int) -> int:
        """Of a sound of so many frames."""
        whole, rest = divmod(frames, self.chunk)
        return whole * halved(self.chunk) + halved(rest)

    def windows(self, frames: int) -> list[int]:
        """Rows of each window of a sound."""
        most, rows = self.window // self.chunk * halved(self.chunk), self.rows(frames)
        return [most] * (rows // most) + ([rows % most] if rows % most else [])


def halved(frames: int) -> int:
    """Rows that three convolutions of stride 2 make of so many frames."""
    return -(-frames // 8)


def aut_spec(audio: Mapping[str, Any]) -> AutSpec:
    """From the raw `audio_config`.

    Raises:
        ConfigError: a missing key, an activation that is not known, heads or windows that do not divide.
    """
    chunk, window = 2 * count(audio, "n_window"), count(audio, "n_window_infer")
    if window % chunk:
        raise ConfigError(f"n_window_infer {window} of the audio config is no multiple of {chunk}")
    layer = replace(encoder_config({**audio, "max_source_positions": halved(chunk)}), key_bias=True)
    return AutSpec(layer, count(audio, "downsample_hidden_size"), chunk, window, count(audio, "output_dim"))


class Encoder(nn.Module):
    """Log-mel frames of items, end to end -> `[rows, out]` of each item."""

    def __init__(self, spec: AutSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, c = spec, dtype, spec.layer
        wide = spec.channels
        self.convolutions = []
        for name, inner in (("conv2d1", 1), ("conv2d2", wide), ("conv2d3", wide)):
            layer = Linear(9 * inner, {name: wide}, True, dtype, device)
            self.add_module(name, layer)
            self.convolutions.append(layer)
        self.join = Linear(wide * halved(c.mels), {"conv_out": c.width}, False, dtype, device)
        self.places = sinusoids(c.positions, c.width).to(device, dtype)
        self.layers = nn.ModuleList(Layer(c, dtype, device) for _ in range(c.layers))
        self.ln_post = Norm(c.width, _EPS, True, dtype, device)
        self.first = Linear(c.width, {"proj1": c.width}, True, dtype, device)
        self.second = Linear(c.width, {"proj2": spec.out}, True, dtype, device)

    def forward(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """`features` `[frames, mels]`: of each item as many as `frames` says."""
        spec, rows = self.spec, [self.spec.rows(n) for n in frames]
        x = torch.cat([self._rows(piece, n) for piece, n in zip(features.split(list(frames)), rows, strict=True)])
        windows = [length for n in frames for length in spec.windows(n)]
        for layer in self.layers:
            x = layer(x, windows)
        out: Tensor = self.second(activation(spec.layer.act, self.first(self.ln_post(x))))
        return list(out.split(rows))

    def _rows(self, features: Tensor, rows: int) -> Tensor:
        """Of one item `[frames, mels]` -> `[rows, width]`: silence behind the sound, up to a whole chunk, is zeros."""
        chunk = self.spec.chunk if self.spec.filled else min(self.spec.chunk, len(features))
        silent = -len(features) % chunk
        chunks = F.pad(features.to(self.dtype), (0, 0, 0, silent)).view(-1, chunk, self.spec.layer.mels)
        made = torch.cat([self._convolved(part) for part in chunks.split(AT_ONCE)])
        return made[:rows]

    def _convolved(self, chunks: Tensor) -> Tensor:
        """`[chunks, frames, mels]` -> `[chunks * rows, width]` with positions."""
        x = chunks.transpose(1, 2)[..., None]  # [chunks, bands, time, channels]
        for layer in self.convolutions:
            around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2)  # [chunks, bands, time, channels, 3, 3]
            shape = around.shape[:3]
            x = activation("gelu", layer(around.reshape(-1, 9 * x.shape[3]))).view(*shape, -1)
        joined = self.join(x.permute(0, 2, 3, 1).reshape(x.shape[0] * x.shape[2], -1))
        placed: Tensor = joined.view(x.shape[0], x.shape[2], -1) + self.places[: x.shape[2]]
        return placed.flatten(0, 1)


def sinusoids(length: int, width: int) -> Tensor:
    """float32 `[length, width]`: sines, then cosines, of frequencies from 1 to 1 / 10,000."""
    step = torch.log(torch.tensor(_TIMESCALE, dtype=torch.float64)).item() / (width // 2 - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(width // 2).float())
    return torch.cat((angles.sin(), angles.cos()), 1)
