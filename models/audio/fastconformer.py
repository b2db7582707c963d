"""FastConformer (arXiv 2305.05084): convolutions that merge eight log-mel frames into a row, then conformer layers.

Each layer attends to the whole item. The bias of a score is the product of the query, plus a learned vector, with a projection
of the sines of the distance (arXiv 1901.02860).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder, StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from .conformer import EPS, ConformerConvolution, ConformerMlp, ConformerMlpSpec, ConvolutionNames, ConvolutionSpec

_QUERIES = 128  # queries at a time
_ROWS = 16  # rows at a time in the convolutions that merge frames
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096, "hidden_act": "silu",
    "attention_bias": True, "convolution_bias": True, "conv_kernel_size": 9, "subsampling_factor": 8,
    "subsampling_conv_channels": 256, "num_mel_bins": 80, "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2,
    "max_position_embeddings": 5000, "scale_input": True,
}  # fmt: skip
_NAMES = ConvolutionNames("norm_conv", "conv.pointwise_conv1", "conv.depthwise_conv", "conv.norm", "conv.pointwise_conv2")


@dataclass(frozen=True)
class FastConformerSpec:
    """The encoder.

    Args:
        mels: bands per frame. channels: of the convolutions that merge frames.
        stages: number of these convolutions; each halves frames and bands.
        inner: width of the MLPs. taps: rows that the convolution over time sees.
        positions: rows of the longest item.
        scale: factor of the rows before the first layer.
        bias, conv_bias: attention and MLPs, or the convolutions over time, have biases.
        padding_row: an item is followed by one frame of padding. If the item fills its last row, there is one more row, which
            takes the mean of all values in attention, and to which no other row attends.
    """

    mels: int
    channels: int
    stages: int
    width: int
    inner: int
    heads: int
    layers: int
    taps: int
    positions: int
    act: str
    scale: float
    bias: bool
    conv_bias: bool
    padding_row: bool = False

    @property
    def factor(self) -> int:
        return 1 << self.stages

    def num_rows(self, frames: int) -> int:
        return -(-(frames + self.padding_row) // self.factor)


def fastconformer_spec(audio: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> FastConformerSpec:
    """Read the raw `encoder_config`. `defaults`: values that the family's config.json leaves out.

    Raises:
        ConfigError: a value is missing, heads do not divide the width, or the convolutions are of another kind.
    """
    audio = {**_DEFAULTS, **(defaults or {}), **audio}
    width, heads, factor = (positive_int(audio, key) for key in ("hidden_size", "num_attention_heads", "subsampling_factor"))
    stages, mels, taps = factor.bit_length() - 1, positive_int(audio, "num_mel_bins"), positive_int(audio, "conv_kernel_size")
    if width % heads or width % 2:
        raise ConfigError(f"hidden_size {width} of encoder_config is odd or not a multiple of num_attention_heads {heads}")
    if factor < 2 or factor != 2**stages or mels % factor:
        reason = f"subsampling_factor {factor} of encoder_config must be a power of two that divides num_mel_bins"
        raise ConfigError(f"{reason}, which is {mels}")
    if (audio["subsampling_conv_kernel_size"], audio["subsampling_conv_stride"]) != (3, 2) or not taps % 2:
        reason = "subsampling_conv_kernel_size must be 3, subsampling_conv_stride 2, and conv_kernel_size odd"
        raise ConfigError(f"{reason} in encoder_config; other values are not supported")
    return FastConformerSpec(
        mels=mels,
        channels=positive_int(audio, "subsampling_conv_channels"),
        stages=stages,
        width=width,
        inner=positive_int(audio, "intermediate_size"),
        heads=heads,
        layers=positive_int(audio, "num_hidden_layers"),
        taps=taps,
        positions=positive_int(audio, "max_position_embeddings"),
        act=check_activation("hidden_act of encoder_config", audio["hidden_act"]),
        scale=width**0.5 if audio["scale_input"] else 1.0,
        bias=bool(audio["attention_bias"]),
        conv_bias=bool(audio["convolution_bias"]),
    )


class FrameMerger:
    """Log-mel frames `[n, mels]` of one item -> `[rows, width]`, by convolutions of stride 2 over time and bands.

    The first one is full, the others are depthwise and followed by a pointwise layer. A few rows are computed at a time, each
    from its own frames: the frames around an item, and the rows around it after each convolution, are zeros.
    """

    def __init__(self, s: FastConformerSpec, build: Builder) -> None:
        self.spec, c = s, s.channels
        self.first = build.linear(["layers.0"], 9, [c], True)
        places = range(2, 3 * s.stages - 1, 3)
        self.others: list[tuple[StoredTensor, StoredTensor, Linear]] = [
            (
                build.stored(f"layers.{i}.weight", c, 1, 3, 3),
                build.stored(f"layers.{i}.bias", c),
                build.linear([f"layers.{i + 1}"], c, [c], True),
            )
            for i in places
        ]
        self.join = build.linear(["linear"], c * (s.mels // s.factor), [s.width], True)

    def __call__(self, frames: Tensor) -> Tensor:
        rows = self.spec.num_rows(len(frames))
        return torch.cat([self._merge(frames, first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS)])

    def _merge(self, frames: Tensor, first: int, last: int) -> Tensor:
        s, count = self.spec, len(frames)
        step = s.factor
        begin, end = step * first - (step - 1), step * last
        x = F.pad(frames[max(begin, 0) : end], (0, 0, max(-begin, 0), max(end - count, 0)))
        for stage in range(s.stages):
            x = self._first(x) if stage == 0 else self._next(x, stage - 1)
            step, count = step // 2, -(-count // 2)
            begin = step * first - (step - 1)
            x[: max(-begin, 0)] = 0
            x[max(count - begin, 0) :] = 0
        return self.join(x.transpose(1, 2).flatten(1))

    def _first(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (1, 1)).unfold(0, 3, 2).unfold(1, 3, 2)  # [frames / 2, mels / 2, 3, 3]
        return self.first(windows.reshape(-1, 9)).relu_().view(*windows.shape[:2], -1)

    def _next(self, x: Tensor, number: int) -> Tensor:
        kernel, bias, pointwise = self.others[number]
        x = F.pad(x, (0, 0, 1, 1))
        rows, bands = (x.shape[0] - 1) // 2, (x.shape[1] - 1) // 2
        out = bias.weight.expand(rows, bands, -1).clone()
        for tap, weight in enumerate(kernel.weight.flatten(1).T):
            down, right = divmod(tap, 3)
            out.addcmul_(x[down : down + 2 * rows : 2, right : right + 2 * bands : 2], weight)
        return pointwise(out.flatten(0, 1)).relu_().view(rows, bands, -1)


def distance_attention(
    qkv: Tensor,
    table: Tensor,
    biases: tuple[StoredTensor, StoredTensor],
    lengths: Sequence[int],
    padded: Sequence[bool] = (),
) -> Tensor:
    """Return `[rows, heads * dim]`, where each row attends to all rows of its item.

    Args:
        qkv: queries, keys and values of items, one after another, `[rows, 3, heads, dim]`.
        table: projected `distance_sines`, `[distances, heads, dim]`.
        biases: vectors `[heads, dim]` that are added to queries for products with keys, and with the table.
        lengths: rows of each item.
        padded: the items whose last row is padding: no other row attends to it, and it takes the mean of all values. Empty:
            none.
    """
    longest, table = (len(table) + 1) // 2, table.permute(1, 2, 0)  # [heads, dim, distances]
    out = qkv.new_empty(len(qkv), qkv.shape[2] * qkv.shape[3])
    parts = zip(qkv.split(list(lengths)), out.split(list(lengths)), padded or [False] * len(lengths), strict=True)
    for rows, target, is_padded in parts:
        n = len(rows) - is_padded
        _attend(rows[:n], table[..., longest - n : longest + n - 1], biases, target[:n])
        if is_padded:
            target[n] = rows[:, 2].flatten(1).mean(0)
    return out


def _attend(rows: Tensor, table: Tensor, biases: tuple[StoredTensor, StoredTensor], target: Tensor) -> None:
    n, (u, v) = len(rows), (stored.weight[:, None] for stored in biases)
    q, key, value = rows.permute(1, 2, 0, 3)
    for first in range(0, n, _QUERIES):
        last = min(first + _QUERIES, n)
        query, count = q[:, first:last], last - first
        near = torch.bmm(query + v, table[..., n - last : 2 * n - 1 - first])  # [heads, queries, distances of the block]
        heads, _, width = near.shape
        bias = near.as_strided((heads, count, n), (count * width, width - 1, 1), count - 1) * q.shape[-1] ** -0.5
        del near
        attended = F.scaled_dot_product_attention((query + u)[None], key[None], value[None], bias[None])
        target[first:last] = attended[0].transpose(0, 1).flatten(1)
        del attended, bias


class DistanceAttention:
    """Attention of each row to all rows of its item, with a bias of the scores that depends on query and distance."""

    def __init__(self, s: FastConformerSpec, build: Builder) -> None:
        self.shape, w = (s.heads, s.width // s.heads), s.width
        self.norm = build.norm("norm_self_att", w, EPS, True)
        attention = build.scope("self_attn")
        self.qkv = attention.linear(["q_proj", "k_proj", "v_proj"], w, [w, w, w], s.bias)
        self.distance = attention.linear(["relative_k_proj"], w, [w], False)
        self.biases = attention.stored("bias_u", *self.shape), attention.stored("bias_v", *self.shape)
        self.out = attention.linear(["o_proj"], w, [w], s.bias)

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor, padded: Sequence[bool] = ()) -> Tensor:
        """Return the attended rows. `padded`: see `distance_attention`."""
        qkv = self.qkv(self.norm(x)).view(-1, 3, *self.shape)
        table = self.distance(sines).view(-1, *self.shape)
        out = distance_attention(qkv, table, self.biases, lengths, padded)
        del qkv, table
        return self.out(out)


class FastConformerLayer:
    def __init__(self, s: FastConformerSpec, build: Builder) -> None:
        first, last = ((f"norm_feed_forward{i}", f"feed_forward{i}.linear1", f"feed_forward{i}.linear2") for i in (1, 2))
        self.first_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, first, s.act, s.bias), build)
        self.attention = DistanceAttention(s, build)
        convolution = ConvolutionSpec(s.width, s.width, s.taps, _NAMES, s.act, s.conv_bias, s.conv_bias)
        self.convolution = ConformerConvolution(convolution, build)
        self.second_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, last, s.act, s.bias), build)
        self.norm = build.norm("norm_out", s.width, EPS, True)

    def __call__(self, x: Tensor, lengths: Sequence[int], sines: Tensor, padded: Sequence[bool]) -> Tensor:
        x = x.add(self.first_mlp(x), alpha=0.5)
        x += self.attention(x, lengths, sines, padded)
        x += self.convolution(x, lengths, padded)
        x.add_(self.second_mlp(x), alpha=0.5)
        return self.norm(x)


class FastConformer(TensorModule):
    """Log-mel frames of items, concatenated, `[frames, mels]` -> `[rows, width]`."""

    def __init__(self, spec: FastConformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, build = spec, dtype, Builder(self, dtype, device)
        self.merge = FrameMerger(spec, build.scope("subsampling"))
        self.blocks = [FastConformerLayer(spec, build.scope(f"layers.{i}")) for i in range(spec.layers)]

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of stored tensors that are not used: they count training steps."""
        return tuple(f"layers.{i}.conv.norm.num_batches_tracked" for i in range(self.spec.layers))

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        lengths = [self.spec.num_rows(n) for n in frames]
        padded = [self.spec.padding_row and n % self.spec.factor == 0 for n in frames]
        x = torch.cat([self.merge(item) for item in features.to(self.dtype).split(list(frames))])
        if self.spec.scale != 1.0:
            x *= self.spec.scale
        sines = distance_sines(self.spec.width, max(lengths), x)
        for layer in self.blocks:
            x = layer(x, lengths, sines, padded)
        return x


def distance_sines(width: int, longest: int, like: Tensor) -> Tensor:
    """Return sines and cosines in turn of the distances from `longest - 1` to `1 - longest`, `[distances, width]`."""
    rate = 1.0 / 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float32, device=like.device) / width)
    angles = torch.arange(longest - 1, -longest, -1, device=like.device)[:, None].float() * rate
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(like.dtype)


def fastconformer_bytes(c: FastConformerSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in FastConformer for up to `rows` rows of one item, inputs included."""
    ops, s, w, x = OpBytes(dtype, limits), dtype.itemsize, c.width, rows * c.width * dtype.itemsize
    mlp = max(ops.norm(w, False) + ops.linear(w, c.inner, rows), ops.mlp(w, c.inner, c.inner, rows))
    base = 2 * x + (2 * rows - 1) * w * s  # the layer's input, the residual stream, the sines
    attention = distance_attention_bytes(w, c.heads, rows, rows, ops)  # a convolution needs less
    layers = base + max(rows * mlp, attention)
    angles = x + distance_sines_bytes(w, rows, ops)
    inputs = rows * c.factor * c.mels * s
    return SMALL + inputs + max(x + max(_merge_bytes(c, rows, ops), x), angles, layers)


def distance_attention_bytes(width: int, heads: int, rows: int, longest: int, ops: OpBytes) -> int:
    """Return the bytes alive in DistanceAttention for `rows` rows, without its input and the sines.

    `longest`: rows of the longest item.
    """
    s, distances, queries = ops.dtype.itemsize, 2 * longest - 1, min(longest, _QUERIES)
    scores = heads * queries * s
    attended = 3 * queries * width * s + ops.torch_attention_tiles(queries, width // heads, longest)
    block = max(scores * (2 * longest + queries), scores * longest + attended)
    projected = rows * ops.linear_result(3 * width, rows) + distances * ops.linear_result(width, distances)
    return projected + rows * width * s + block


def distance_sines_bytes(width: int, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in `distance_sines` for an item of `rows` rows."""
    return (2 * rows - 1) * width * (5 * FLOAT32 // 2 + ops.float32_copy)


def _merge_bytes(c: FastConformerSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in FrameMerger while a few rows are computed, without the earlier rows."""
    s, width = ops.dtype.itemsize, c.channels
    frames = (min(rows, _ROWS) + 1) * c.factor - 1
    early, late = frames // 2 * (c.mels // 2), frames // 4 * (c.mels // 4)  # outputs of a channel of two convolutions
    first = frames * (2 * c.mels + 2) * s + early * (9 * s + ops.linear(9, width, early))
    second = early * ops.linear_result(width, early) + frames // 2 * (c.mels // 2 + 2) * width * s
    second += late * (width * s + ops.linear(width, width, late)) if c.stages > 1 else 0
    return max(first, second)
