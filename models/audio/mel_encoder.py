"""The packed Whisper encoder: log-mel frames of items of many requests in one call.

The published form always computes 30 s and includes the silence; here only the rows of the item are computed, with equal
results: the convolutions see the first silent frames after it, and attention sees none.

Source: arXiv 2212.04356 (two convolutions, the second of stride 2, a table of positions, pre-norm layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int
from ...kernels.activation import activation
from ...kernels.dispatch import backend
from ...kernels.rope import rotate_
from ...kernels.varlen import varlen_attention, varlen_attention_with_trailing
from ..interface import StepLimits
from ..layers.basic import EmbeddingTable, Norm, TensorModule
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from ..text.rope import Rotary
from ..text.spec import RopeSpec

EPS = 1e-5
_WINDOW_ROWS = 64  # queries at a time of attention within windows
LARGE: Mapping[str, int] = {
    "hidden_size": 1280,
    "num_attention_heads": 20,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "max_position_embeddings": 1500,
    "num_mel_bins": 128,
}
"""Sizes of the largest Whisper, for configs that leave them out. Keys are aliases, so that a config's value has priority."""
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
    "hidden_act": "activation_function",
    "max_position_embeddings": "max_source_positions",
}
"""Other names of a key -> the name that is read here, which has priority if both are present."""

CosSin = tuple[Tensor, Tensor] | None
Window = tuple[int, int] | None


@dataclass(frozen=True)
class MelEncoderNames:
    """Names of the parts of a layer and of the final norm in the checkpoint."""

    norms: tuple[str, str] = ("self_attn_layer_norm", "final_layer_norm")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("fc1", "fc2")
    end: str = "layer_norm"


@dataclass(frozen=True)
class MelEncoderSpec:
    """A Whisper encoder.

    Args:
        mels: mel bands per frame.
        positions: rows of the longest item, half of its frames.
        key_bias: the key projection has a bias.
        rope: rotary positions; None: positions come from a table.
        interleaved: rotated pairs are adjacent numbers; otherwise halves of the rotated part.
        bias: norms and the projections of attention have a bias. norm_offset: added to the weights of norms.
        qkv_bias, out_bias: these projections have a bias also if `bias` is off.
        attention_dim: numbers per head; None: `width // heads`. kv_heads: heads of keys and values; None: as many as `heads`.
    """

    mels: int
    width: int
    inner: int
    heads: int
    layers: int
    positions: int
    act: str = "gelu"
    key_bias: bool = False
    rope: RopeSpec | None = None
    names: MelEncoderNames = MelEncoderNames()
    interleaved: bool = False
    bias: bool = True
    norm_offset: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    attention_dim: int | None = None
    kv_heads: int | None = None

    @property
    def head_dim(self) -> int:
        return self.attention_dim or self.width // self.heads

    @property
    def rotary_dim(self) -> int:
        """Leading numbers of a head that are rotated."""
        return 0 if self.rope is None else self.rope.dim

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * self.head_dim


def mel_encoder_spec(audio: Mapping[str, Any]) -> MelEncoderSpec:
    """Read the raw `audio_config`, or the whole config.json of a Whisper model.

    Raises:
        ConfigError: a missing key, an unknown activation, or heads that do not divide the width.
    """
    audio = {ALIASES[key]: value for key, value in audio.items() if key in ALIASES} | dict(audio)
    mels, positions = positive_int(audio, "num_mel_bins"), positive_int(audio, "max_source_positions")
    return MelEncoderSpec(mels=mels, positions=positions, width=positive_int(audio, "d_model"), **layer_sizes(audio, "encoder"))


def layer_sizes(config: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Read the sizes of the "encoder" or "decoder" side: inner, heads, layers, act; ConfigError like `mel_encoder_spec`."""
    width, heads = positive_int(config, "d_model"), positive_int(config, f"{side}_attention_heads")
    if width % heads:
        raise ConfigError(f"d_model {width} is not a multiple of {side}_attention_heads {heads}")
    act = check_activation("activation_function", config.get("activation_function", "gelu"))
    inner, layers = positive_int(config, f"{side}_ffn_dim"), positive_int(config, f"{side}_layers")
    return {"inner": inner, "heads": heads, "layers": layers, "act": act}


def encoder_norm(c: MelEncoderSpec, name: str, dtype: torch.dtype, device: torch.device) -> Norm:
    return Norm(c.width, EPS, c.bias, dtype, device, stored=name, offset=c.norm_offset, centered=True)


class MelEncoderAttention(TensorModule):
    def __init__(
        self, c: MelEncoderSpec, dtype: torch.dtype, device: torch.device, window: Window = None, chunk: int = 0
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.heads, self.dim, self.rotary_dim, self.interleaved = c.heads, c.head_dim, c.rotary_dim, c.interleaved
        self.window = window
        self.qv = Linear(c.width, {"q_proj": c.attention_width, "v_proj": c.kv_width}, c.bias or c.qkv_bias, dtype, device)
        self.k = Linear(c.width, {"k_proj": c.kv_width}, c.key_bias or c.qkv_bias, dtype, device)
        self.out = Linear(c.attention_width, {c.names.out: c.width}, c.bias or c.out_bias, dtype, device)

    def forward(self, x: Tensor, lengths: Sequence[int], cos_sin: CosSin = None, trailing: Sequence[int | None] = ()) -> Tensor:
        heads = self.qv(x).view(x.shape[0], -1, self.dim)
        q, v = heads[:, : self.heads], heads[:, self.heads :]
        k = self.k(x).view(v.shape)
        if cos_sin is not None:
            for part in (q, k):
                rotate_(part[..., : self.rotary_dim], *cos_sin, self.interleaved)
        if v.shape != q.shape:
            k, v = (part.repeat_interleave(self.heads // part.shape[1], 1) for part in (k, v))
        attend: Callable[..., Tensor] = varlen_attention
        if trailing:
            attend = partial(varlen_attention_with_trailing, trailing=trailing)
        elif self.chunk:
            attend = partial(_attend_chunks, chunk=self.chunk)
        elif self.window is not None:
            attend = partial(_attend_within, window=self.window)
        return self.out(attend(q, k, v, lengths, scale=self.dim**-0.5).flatten(1))


class MelEncoderLayer(TensorModule):
    """A pre-norm layer. `window`: (a, b): a row attends to the last a rows up to its own and to fewer than b rows after it.

    `chunk`: a row attends to all rows up to the end of its own chunk of this many rows; 0: to all rows of its item.
    """

    def __init__(
        self, c: MelEncoderSpec, dtype: torch.dtype, device: torch.device, window: Window = None, chunk: int = 0
    ) -> None:
        super().__init__()
        self.act = c.act
        first, last = c.names.norms
        self.self_attn_layer_norm = encoder_norm(c, first, dtype, device)
        self.final_layer_norm = encoder_norm(c, last, dtype, device)
        self.self_attn = MelEncoderAttention(c, dtype, device, window, chunk)
        up, down = c.names.mlp
        self.first = Linear(c.width, {up: c.inner}, True, dtype, device)
        self.second = Linear(c.inner, {down: c.width}, True, dtype, device)

    def forward(self, x: Tensor, lengths: Sequence[int], cos_sin: CosSin = None, trailing: Sequence[int | None] = ()) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), lengths, cos_sin, trailing)
        return x + self.second(activation(self.act, self.first(self.final_layer_norm(x))))


class MelEncoder(nn.Module):
    """Log-mel frames of items, concatenated -> `[rows(frames) // pool, width]` per item, normed.

    Args:
        pool: number of adjacent rows that are averaged to one before the last norm; an incomplete last group is dropped.
        silence: silent frames follow each item in the input; otherwise the convolutions see zeros after it.
        chunk: see MelEncoderLayer.
    """

    __call__: Callable[..., list[Tensor]]

    def __init__(
        self,
        c: MelEncoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        pool: int = 1,
        *,
        silence: bool = True,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.pool, self.silence, self.dtype, self.device = c, pool, silence, dtype, device
        self.conv1 = Linear(3 * c.mels, {"conv1": c.width}, True, dtype, device)
        self.conv2 = Linear(3 * c.width, {"conv2": c.width}, True, dtype, device)
        self.rotary = None if c.rope is None else Rotary(c.rope, device)
        self.embed_positions = None if c.rope else EmbeddingTable(c.positions, c.width, dtype, device)
        self.layers = nn.ModuleList(MelEncoderLayer(c, dtype, device, chunk=chunk) for _ in range(c.layers))
        self.layer_norm = encoder_norm(c, c.names.end, dtype, device)

    def rows(self, frames: int) -> int:
        """Return the number of rows of an item, before pooling."""
        return (frames + 1) // 2

    def forward(self, features: Tensor, frames: Sequence[int], trailing: Sequence[int | None] = ()) -> list[Tensor]:
        """Encode the items.

        Args:
            features: `[frames, mels]`: per item its own frames, then silence up to `2 * rows + 1` frames (or up to
                the longest item of the encoder, if that is less).
            frames: frames of each item, without silence.
            trailing: per item, the number of rows after its own that are also computed; their frames must be in `features`.
                They attend to the item's rows, none attends to them. None: no such rows. Empty: none for any item.
        """
        item_rows = [self.rows(n) for n in frames]
        lengths = [n + (more or 0) for n, more in zip(item_rows, trailing, strict=True)] if trailing else item_rows
        follows = [self.silence or more is not None for more in trailing or [None] * len(frames)]
        outputs = [2 * rows if more else n for rows, n, more in zip(lengths, frames, follows, strict=True)]
        inputs = [min(n + more, 2 * self.config.positions) for n, more in zip(outputs, follows, strict=True)]
        x = features.to(self.dtype)
        x = activation("gelu", self.conv1(windows(x, inputs, outputs, 1)))
        x = activation("gelu", self.conv2(windows(x, outputs, lengths, 2)))
        if self.embed_positions is not None:
            x = x + torch.cat([self.embed_positions.weight[:n] for n in lengths])
        cos_sin = self._cos_sin(lengths)
        for layer in self.layers:
            x = layer(x, item_rows, cos_sin, trailing)
        pooled = [averaged(rows, self.pool) for rows in x.split(lengths)]
        normed = self.layer_norm(torch.cat(pooled))
        return list(normed.split([len(rows) for rows in pooled]))

    def _cos_sin(self, lengths: Sequence[int]) -> CosSin:
        """Return cosines and sines of each row's position in its item; None if positions come from a table."""
        if self.rotary is None:
            return None
        return self.rotary(torch.cat([torch.arange(n, device=self.device) for n in lengths])[None])[:2]


def sinusoids(positions: int, width: int) -> Tensor:
    """Return the position table that some checkpoints do not store: sines, then cosines, of periods from 2 pi to 20,000 pi."""
    half = width // 2
    angles = torch.arange(positions)[:, None] * torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _attend_within(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, window: tuple[int, int]) -> Tensor:
    """Attend within segments, each row to the last `window[0]` rows up to its own and fewer than `window[1]` rows after it."""
    out, start = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    left, right = window[0] - 1, max(0, window[1] - 1)
    for length in lengths:
        for first in range(0, length, _WINDOW_ROWS):
            last = min(first + _WINDOW_ROWS, length)
            low, high = max(0, first - left), min(length, last + right)
            distance = torch.arange(low, high, device=q.device) - torch.arange(first, last, device=q.device)[:, None]
            mask = (distance >= -left) & (distance <= right)
            keys, rows = slice(start + low, start + high), slice(start + first, start + last)
            query, key, value = (part.transpose(0, 1)[None] for part in (q[rows], k[keys], v[keys]))
            attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
            out[rows] = attended[0].transpose(0, 1)
        start += length
    return out


def _attend_chunks(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, chunk: int) -> Tensor:
    """Attend within segments, each row to all rows up to the end of its chunk."""
    out, start = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
    for length in lengths:
        for first in range(start, start + length, chunk):
            rows = slice(first, min(first + chunk, start + length))
            query, key, value = (part.transpose(0, 1)[None] for part in (q[rows], k[start : rows.stop], v[start : rows.stop]))
            out[rows] = F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
        start += length
    return out


def windows(x: Tensor, inputs: Sequence[int], outputs: Sequence[int], stride: int) -> Tensor:
    """Return the inputs of a convolution of three taps, zero-padded per item: `[sum(inputs), c]` -> `[sum(outputs), 3 * c]`."""
    out = x.new_zeros(sum(outputs), x.shape[1], 3)  # in the order of the stored weights
    for source, target in zip(x.split(list(inputs)), out.split(list(outputs)), strict=True):
        for tap, (shifted, first) in enumerate(((source[stride - 1 :], 1), (source, 0), (source[1:], 0))):
            strided = shifted[::stride][: len(target) - first]
            target[first : first + len(strided), :, tap] = strided
    return out.flatten(1)


def averaged(rows: Tensor, pool: int) -> Tensor:
    """Average groups of `pool` adjacent rows; an incomplete last group is dropped."""
    if pool == 1:
        return rows
    whole = len(rows) // pool * pool
    return rows[:whole].view(-1, pool, rows.shape[1]).mean(1)


def mel_encoder_bytes(c: MelEncoderSpec, frames: int, out_width: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in MelEncoder and a projection to `out_width`, for up to `frames` frames, features included.

    Slightly fewer frames can need more memory than `frames`, because padding their rows copies the inputs.
    """
    ops = OpBytes(dtype, limits)
    return max(_mel_encoder_bytes(c, n, out_width, ops) for n in range(max(1, frames - 3), frames + 1))


def _mel_encoder_bytes(c: MelEncoderSpec, frames: int, out_width: int, ops: OpBytes) -> int:
    s, w, rows = ops.dtype.itemsize, c.width, (frames + 1) // 2
    mels, row = c.mels * s, c.width * s
    convolution = 3 * mels + ops.linear(3 * c.mels, w, frames)
    first = max(convolution, ops.linear_result(w, frames) + row)  # or before and after gelu
    second = max(3 * row + ops.linear(3 * w, w, rows), ops.linear_result(w, rows) + row)
    cos_sin = c.rotary_dim * FLOAT32
    layers = max(3 * row, cos_sin + mel_layer_bytes(c, rows, ops))  # x, positions, their sum
    end = cos_sin + 2 * row + ops.norm(w, False) + 2 * out_width * s
    base = SMALL + frames * mels + attention_tiles(c, rows, ops)
    return base + max(frames * first, frames * row + rows * second, rows * max(layers, end))


def mel_layer_bytes(c: MelEncoderSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes per row in MelEncoderLayer: the residual stream, attention or MLP, and their sum."""
    s, w, a = ops.dtype.itemsize, c.width, c.attention_width
    row, norm = w * s, ops.norm(w, False)
    repeated = 2 * c.kv_width * (c.kv_width != a)  # keys and values beside their copies
    qkv, attended, copies = (3 * a + repeated) * s, a * s, ops.attention_copies(a)
    attention = row + max(norm + qkv, row + qkv + attended + copies, row + qkv + attended + ops.linear(a, w, rows), 2 * row)
    if c.rotary_dim and backend("rotary", ops.limits.device, ops.dtype) != "native":
        attention = max(attention, row + qkv + ops.torch_rotary(c.heads * c.rotary_dim))
    # the caller also holds the layer's input
    return max(attention, 2 * row + max(norm + ops.linear(w, c.inner, rows), ops.mlp(w, c.inner, c.inner, rows)))


def attention_tiles(c: MelEncoderSpec, rows: int, ops: OpBytes) -> int:
    return 0 if ops.fused("varlen_attention") else ops.torch_attention_tiles(rows, c.head_dim)
