"""The packed Whisper encoder over chunks: each is convolved, placed and seen alone. Knows no family.

Source: arXiv 2503.20215, section 2.2 (attention within blocks of two seconds), and the config's keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ..layers.basic import Norm
from ..layers.linear import Linear
from .aut import sinusoids
from .mel_encoder import EncoderConfig, Layer, averaged, windows

_EPS = 1e-5


class ChunkedEncoder(nn.Module):
    """Log-mel frames of items, end to end -> `[rows, out]` of each item: pairs of neighbouring rows averaged, projected."""

    def __init__(self, c: EncoderConfig, out: int, dtype: torch.dtype, device: torch.device) -> None:
        """`c.positions`: rows of a chunk, half its frames."""
        super().__init__()
        self.config, self.dtype = c, dtype
        self.conv1 = Linear(3 * c.mels, {"conv1": c.width}, True, dtype, device)
        self.conv2 = Linear(3 * c.width, {"conv2": c.width}, True, dtype, device)
        self.places = sinusoids(c.positions, c.width).to(device, dtype)
        self.layers = nn.ModuleList(Layer(c, dtype, device) for _ in range(c.layers))
        self.ln_post = Norm(c.width, _EPS, True, dtype, device)
        self.proj = Linear(c.width, {"proj": out}, True, dtype, device)

    def chunks(self, frames: int) -> list[int]:
        """Frames of each chunk of a sound."""
        size = 2 * self.config.positions
        return [size] * (frames // size) + ([frames % size] if frames % size else [])

    def forward(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """`features` `[frames, mels]`: of each item as many as `frames` says."""
        cut = [n for sound in frames for n in self.chunks(sound)]
        rows, sounds = [(n + 1) // 2 for n in cut], [(n + 1) // 2 for n in frames]
        x = features.to(self.dtype)
        x = activation("gelu", self.conv1(windows(x, cut, cut, 1)))
        x = activation("gelu", self.conv2(windows(x, cut, rows, 2)))
        x = x + torch.cat([self.places[:n] for n in rows])
        for layer in self.layers:
            x = layer(x, rows)
        made = torch.cat([averaged(sound, 2) for sound in x.split(sounds)])
        return list(self.proj(self.ln_post(made)).split([n // 2 for n in sounds]))
