"""The packed Whisper encoder: log-mel frames of items of many requests in one call. Knows no family's connector.

Source: arXiv 2212.04356 (two convolutions, the second of stride 2, positions from a table, pre-norm layers). Its published
form always computes the longest sound and masks what is silent; here only the rows of a sound are computed, which is the
same: the convolutions see the first frames of the silence after it, attention sees none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from ...kernels.rope import rotary_cos_sin, rotate_
from ...kernels.varlen import varlen_attention
from ...mm.errors import ConfigError
from ..config import count, known_act
from ..layers.basic import Embedding, Norm
from ..layers.linear import Linear

_EPS = 1e-5
LARGE: Mapping[str, int] = {
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
}
"""Of the largest Whisper, from which families started (arXiv 2407.10759, 2503.20215) whose config.json leaves it out."""
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
    "hidden_act": "activation_function",
    "max_position_embeddings": "max_source_positions",
}
"""Names that configs have for the same number -> those that are read here, and win where both are there."""

Angles = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Names:
    """Of parts in the checkpoint: of a layer, and the norm behind all."""

    norms: tuple[str, str] = ("self_attn_layer_norm", "final_layer_norm")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("fc1", "fc2")
    end: str = "layer_norm"


@dataclass(frozen=True)
class EncoderConfig:
    """`mels`: bands of a frame; `positions`: rows of the longest sound, half its frames; `key_bias`: keys have one.

    `turned`: leading numbers of a head that rotary positions of base `theta` turn; 0: positions come from a table instead.
    """

    mels: int
    width: int
    inner: int
    heads: int
    layers: int
    positions: int
    act: str = "gelu"
    key_bias: bool = False
    turned: int = 0
    theta: float = 10_000.0
    names: Names = Names()


def encoder_config(audio: Mapping[str, Any]) -> EncoderConfig:
    """From the raw `audio_config`, or a Whisper's whole config.json, with Whisper's own key names.

    Raises:
        ConfigError: a missing key, an activation that is not known, heads that do not divide the width.
    """
    audio = {ALIASES[key]: value for key, value in audio.items() if key in ALIASES} | dict(audio)
    mels, positions = count(audio, "num_mel_bins"), count(audio, "max_source_positions")
    return EncoderConfig(mels=mels, positions=positions, width=count(audio, "d_model"), **layer_sizes(audio, "encoder"))


def layer_sizes(config: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Of the "encoder" or the "decoder": inner, heads, layers, act; ConfigError as `encoder_config` says."""
    width, heads = count(config, "d_model"), count(config, f"{side}_attention_heads")
    if width % heads:
        raise ConfigError(f"d_model {width} is no multiple of {side}_attention_heads {heads}")
    act = known_act("activation_function", config.get("activation_function", "gelu"))
    return {"inner": count(config, f"{side}_ffn_dim"), "heads": heads, "layers": count(config, f"{side}_layers"), "act": act}


class Attention(nn.Module):
    def __init__(self, c: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.dim, self.turned = c.heads, c.width // c.heads, c.turned
        self.qv = Linear(c.width, {"q_proj": c.width, "v_proj": c.width}, True, dtype, device)
        self.k = Linear(c.width, {"k_proj": c.width}, c.key_bias, dtype, device)
        self.out = Linear(c.width, {c.names.out: c.width}, True, dtype, device)

    def forward(self, x: Tensor, lengths: Sequence[int], angles: Angles = None, behind: Sequence[int | None] = ()) -> Tensor:
        q, v = self.qv(x).view(x.shape[0], 2, self.heads, self.dim).unbind(1)
        k = self.k(x).view(x.shape[0], self.heads, self.dim)
        if angles is not None:
            for part in (q, k):
                rotate_(part[..., : self.turned], *angles)
        see = varlen_attention if not behind else partial(_see, behind=behind)
        return self.out(see(q, k, v, lengths, scale=self.dim**-0.5).flatten(1))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, c: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act = c.act
        first, last = c.names.norms
        self.self_attn_layer_norm = Norm(c.width, _EPS, True, dtype, device, stored=first)
        self.final_layer_norm = Norm(c.width, _EPS, True, dtype, device, stored=last)
        self.self_attn = Attention(c, dtype, device)
        up, down = c.names.mlp
        self.first = Linear(c.width, {up: c.inner}, True, dtype, device)
        self.second = Linear(c.inner, {down: c.width}, True, dtype, device)

    def forward(self, x: Tensor, lengths: Sequence[int], angles: Angles = None, behind: Sequence[int | None] = ()) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), lengths, angles, behind)
        return x + self.second(activation(self.act, self.first(self.final_layer_norm(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Log-mel frames of items, end to end -> `[rows, width]`, `rows(frames) // pool` of each item, normed.

    `pool`: neighbouring rows averaged to one before the last norm; a row that is left over is dropped. `silence`: follows
    each sound; without it the convolutions see zeros behind it.
    """

    def __init__(
        self, c: EncoderConfig, dtype: torch.dtype, device: torch.device, pool: int = 1, *, silence: bool = True
    ) -> None:
        super().__init__()
        self.config, self.pool, self.silence, self.dtype, self.device = c, pool, silence, dtype, device
        self.conv1 = Linear(3 * c.mels, {"conv1": c.width}, True, dtype, device)
        self.conv2 = Linear(3 * c.width, {"conv2": c.width}, True, dtype, device)
        self.embed_positions = None if c.turned else Embedding(c.positions, c.width, dtype, device)
        self.layers = nn.ModuleList(Layer(c, dtype, device) for _ in range(c.layers))
        self.layer_norm = Norm(c.width, _EPS, True, dtype, device, stored=c.names.end)

    def rows(self, frames: int) -> int:
        """Rows of so many frames of sound, before pooling."""
        return (frames + 1) // 2

    def forward(self, features: Tensor, frames: Sequence[int], behind: Sequence[int | None] = ()) -> list[Tensor]:
        """`features` `[frames, mels]`: of each item the frames of its sound, as many as `frames` says, then any
        silence up to `2 * rows + 1` frames, or to the longest sound the encoder takes where that is less.

        `behind`: rows of each item that are made of what follows its sound, which has to be given then, too. They see the
        sound and are not seen. None: nothing follows; empty: of no item.
        """
        sounding = [self.rows(n) for n in frames]
        lengths = [n + (more or 0) for n, more in zip(sounding, behind, strict=True)] if behind else sounding
        follows = [self.silence or more is not None for more in behind or [None] * len(frames)]
        heard = [2 * rows if more else n for rows, n, more in zip(lengths, frames, follows, strict=True)]
        given = [min(n + more, 2 * self.config.positions) for n, more in zip(heard, follows, strict=True)]
        x = features.to(self.dtype)
        x = activation("gelu", self.conv1(windows(x, given, heard, 1)))
        x = activation("gelu", self.conv2(windows(x, heard, lengths, 2)))
        if self.embed_positions is not None:
            x = x + torch.cat([self.embed_positions.weight[:n] for n in lengths])
        angles = self._angles(lengths)
        for layer in self.layers:
            x = layer(x, sounding, angles, behind)
        pooled = [averaged(rows, self.pool) for rows in x.split(lengths)]
        normed: Tensor = self.layer_norm(torch.cat(pooled))
        return list(normed.split([len(rows) for rows in pooled]))

    def _angles(self, lengths: Sequence[int]) -> Angles:
        """Cosines and sines of each row's place in its sound; None where positions come from a table."""
        if not self.config.turned:
            return None
        half, device = self.config.turned // 2, self.device
        frequencies = self.config.theta ** (-torch.arange(half, device=device) / half)
        places = torch.cat([torch.arange(n, device=device) for n in lengths])
        return rotary_cos_sin(places[None], frequencies, torch.zeros(half, dtype=torch.int64, device=device))


def sinusoids(positions: int, width: int) -> Tensor:
    """The table of positions of checkpoints that store none: sines, then cosines, of periods from 2 pi to 20,000 pi."""
    half = width // 2
    turns = torch.arange(positions)[:, None] * torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half))
    return torch.cat((turns.sin(), turns.cos()), dim=1)


def _see(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, behind: Sequence[int | None]) -> Tensor:
    """`varlen_attention` of items with as many rows `behind` each, which see its other rows and are not seen."""
    out, start = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    for length, more in zip(lengths, (n or 0 for n in behind), strict=True):
        own, rest = slice(start, start + length), slice(start + length, start + length + more)
        out[own] = varlen_attention(q[own], k[own], v[own], [length], scale)
        if more:
            query, key, value = (part.transpose(0, 1)[None] for part in (q[rest], k[own], v[own]))
            out[rest] = F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
        start = rest.stop
    return out


def windows(x: Tensor, given: Sequence[int], wanted: Sequence[int], stride: int) -> Tensor:
    """What a convolution of three taps sees, zeros around each item: `[sum(given), c]` -> `[sum(wanted), 3 * c]`."""
    out = x.new_zeros(sum(wanted), x.shape[1], 3)  # the order of the stored weights
    for piece, part in zip(x.split(list(given)), out.split(list(wanted)), strict=True):
        for tap, (source, first) in enumerate(((piece[stride - 1 :], 1), (piece, 0), (piece[1:], 0))):
            seen = source[::stride][: len(part) - first]
            part[first : first + len(seen), :, tap] = seen
    return out.flatten(1)


def averaged(rows: Tensor, pool: int) -> Tensor:
    if pool == 1:
        return rows
    whole = len(rows) // pool * pool
    return rows[:whole].view(-1, pool, rows.shape[1]).mean(1)
