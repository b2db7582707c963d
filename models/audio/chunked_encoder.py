"""The packed Whisper encoder over chunks: convolutions, positions and attention are within a chunk.

Source: arXiv 2503.20215, section 2.2 (attention within blocks of two seconds), and the config's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import Norm
from ..layers.linear import Linear
from .mel_encoder import MelEncoderLayer, MelEncoderSpec, averaged, mel_encoder_bytes, sinusoids, windows

_EPS = 1e-5


class ChunkedEncoder(nn.Module):
    """Log-mel frames of items, concatenated -> `[rows, out]` per item: adjacent rows averaged in pairs, normed, projected."""

    __call__: Callable[..., list[Tensor]]

    def __init__(self, c: MelEncoderSpec, out: int, dtype: torch.dtype, device: torch.device) -> None:
        """Build the layers; `c.positions` is the number of rows of a chunk, half of its frames."""
        super().__init__()
        self.config, self.dtype = c, dtype
        self.conv1 = Linear(3 * c.mels, {"conv1": c.width}, True, dtype, device)
        self.conv2 = Linear(3 * c.width, {"conv2": c.width}, True, dtype, device)
        self.positions = sinusoids(c.positions, c.width).to(device, dtype)
        self.layers = nn.ModuleList(MelEncoderLayer(c, dtype, device) for _ in range(c.layers))
        self.ln_post = Norm(c.width, _EPS, True, dtype, device)
        self.proj = Linear(c.width, {"proj": out}, True, dtype, device)

    def _max_frames(self, rows: int) -> int:
        """Return the most frames of `rows` rows: convolution and average divide by 4, and up to three frames are dropped."""
        return 4 * rows + 3

    def input_bytes(self, rows: int) -> int:
        return self._max_frames(rows) * self.config.mels * self.dtype.itemsize

    def encoder_bytes(self, rows: int, limits: StepLimits) -> int:
        return mel_encoder_bytes(self.config, self._max_frames(rows), self.proj.outputs, self.dtype, limits)

    def chunks(self, frames: int) -> list[int]:
        """Return the frames of each chunk of an item."""
        size = 2 * self.config.positions
        return [size] * (frames // size) + ([frames % size] if frames % size else [])

    def forward(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """Encode `features` `[frames, mels]`, the frames of all items; `frames`: number of frames of each item."""
        chunks = [n for item in frames for n in self.chunks(item)]
        rows, items = [(n + 1) // 2 for n in chunks], [(n + 1) // 2 for n in frames]
        x = features.to(self.dtype)
        x = activation("gelu", self.conv1(windows(x, chunks, chunks, 1)))
        x = activation("gelu", self.conv2(windows(x, chunks, rows, 2)))
        x = x + torch.cat([self.positions[:n] for n in rows])
        for layer in self.layers:
            x = layer(x, rows)
        pooled = torch.cat([averaged(item, 2) for item in x.split(items)])
        return list(self.proj(self.ln_post(pooled)).split([n // 2 for n in items]))
