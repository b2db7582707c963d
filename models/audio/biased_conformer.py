"""A conformer whose attention scores have a learned bias per distance, after convolutions that merge eight frames into a row.

Each layer has two half-weighted MLPs around attention and a causal convolution over time. Items of more than 500 rows are cut
into segments of 500, the last of them filled up with zeros that are attended to, as published.

Sources: arXiv 2005.08100 (the layer), arXiv 1910.10683 (the bias), arXiv 2305.05084 (the convolutions), the published model.
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
from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.convolution import add_depthwise_
from ..memory_formulas import SMALL, OpBytes

_EPS = 1e-5
_SEGMENT = 500  # rows that attend to each other
_BLOCK = 32  # rows of the result for which convolutions are computed at a time


@dataclass(frozen=True)
class BiasedConformerSpec:
    """The encoder.

    Args:
        bands: mel bands of a frame. channels: of the convolutions. halvings: number of convolutions, each of stride 2.
        inner: width of the MLPs. taps: rows that the convolution over time sees, the row's own included.
        distances: the table has a bias for distances from -distances to distances - 1; farther ones count as these. symmetric:
            only for those from 0 on, in both directions.
        multiplier: channels of the convolution over time for each of its inputs.
        act, gate_act, conv_act: activations of the MLPs' gates, of the convolution's gates, and after the convolution.
    """

    bands: int
    channels: int
    halvings: int
    width: int
    inner: int
    heads: int
    layers: int
    taps: int
    distances: int
    act: str
    gate_act: str
    conv_act: str
    first_act: str
    symmetric: bool = False
    multiplier: int = 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def reduction(self) -> int:
        """Frames per row."""
        return 1 << self.halvings

    def num_rows(self, frames: int) -> int:
        return -(-frames // self.reduction)

    def bands_after(self, convolutions: int) -> int:
        return -(-self.bands // (1 << convolutions))


def biased_conformer_spec(audio: Mapping[str, Any]) -> BiasedConformerSpec:
    """Read the raw `audio_config`; ConfigError for a missing key, or a feature that is not supported."""
    width, heads = positive_int(audio, "hidden_size"), positive_int(audio, "num_attention_heads")
    reduction = positive_int(audio, "time_reduction")
    if audio.get("chunk_size", -1) > 0:
        raise ConfigError(
            f"chunk_size of audio_config is {audio['chunk_size']!r}; only -1 is supported, because the published model masks "
            "rows of other chunks and transformers does not"
        )
    for key, value in {"downsample_rate": 1, "ext_pw_out_channel": width, "depthwise_separable_out_channel": width}.items():
        if audio.get(key, value) != value:
            raise ConfigError(f"{key} of audio_config is {audio[key]!r}; the layers after it need {value}")
    if width % heads or reduction & (reduction - 1) or reduction < 2:
        sizes = f"hidden_size {width}, {heads} heads and time_reduction {reduction}"
        raise ConfigError(f"audio_config has {sizes}; heads must divide hidden_size, time_reduction must be a power of 2")
    acts = [
        check_activation(f"{key} of audio_config", audio[key])
        for key in ("activation", "conv_glu_type", "conv_activation", "nemo_activation")
    ]
    return BiasedConformerSpec(
        bands=positive_int(audio, "input_size"),
        channels=positive_int(audio, "nemo_conv_channels"),
        halvings=reduction.bit_length() - 1,
        width=width,
        inner=positive_int(audio, "intermediate_size"),
        heads=heads,
        layers=positive_int(audio, "num_blocks"),
        taps=positive_int(audio, "kernel_size"),
        distances=positive_int(audio, "bias_max_distance"),
        act=acts[0],
        gate_act=acts[1],
        conv_act=acts[2],
        first_act=acts[3],
        symmetric=bool(audio.get("bias_symmetric", False)),
        multiplier=positive_int({"depthwise_multiplier": 1, **audio}, "depthwise_multiplier"),
    )


class Subsampling:
    """`[frames, bands]` of one item -> `[rows, width]` by convolutions of stride 2; all but the first are depthwise."""

    def __init__(self, s: BiasedConformerSpec, build: Builder) -> None:
        self.spec, c = s, s.channels
        self.first = build.linear(["conv.0"], 9, [c], True)
        self.others = [
            (
                build.stored(f"conv.{3 * i - 1}.weight", c, 1, 3, 3),
                build.stored(f"conv.{3 * i - 1}.bias", c),
                build.linear([f"conv.{3 * i}"], c, [c], True),
            )
            for i in range(1, s.halvings)
        ]
        self.out = build.linear(["out"], c * s.bands_after(s.halvings), [s.width], True)

    def __call__(self, frames: Tensor) -> Tensor:
        """Convolve in blocks of rows, so that few outputs of the convolutions are alive."""
        s = self.spec
        rows = s.num_rows(len(frames))
        out = frames.new_empty(rows, s.width)
        for start in range(0, rows, _BLOCK):
            block = self._level(frames, s.halvings, start, min(start + _BLOCK, rows))
            out[start : start + len(block)] = self.out(block.transpose(1, 2).flatten(1))
        return out

    def _level(self, frames: Tensor, level: int, start: int, stop: int) -> Tensor:
        """Return rows `[start, stop)` after `level` convolutions: `[rows, bands, channels]`."""
        below = -(-len(frames) // (1 << (level - 1)))
        first, last = 2 * start - 1, 2 * stop
        inside = max(0, first), min(last, below)
        edges = (inside[0] - first, last - inside[1])  # beyond the item, inputs are 0
        if level == 1:
            padded = F.pad(frames[inside[0] : inside[1]], (1, 1, *edges))
            windows = padded.unfold(0, 3, 2).unfold(1, 3, 2)
            return self._activate(self.first(windows.reshape(-1, 9))).view(*windows.shape[:2], -1)
        padded = F.pad(self._level(frames, level - 1, *inside), (0, 0, 1, 1, *edges))
        kernel, bias, join = self.others[level - 2]
        tall, wide = stop - start, (padded.shape[1] - 1) // 2
        out = bias.weight.repeat(tall, wide, 1)
        for i in range(3):
            for j in range(3):
                out.addcmul_(padded[i : i + 2 * tall - 1 : 2, j : j + 2 * wide - 1 : 2], kernel.weight[:, 0, i, j])
        del padded
        return self._activate(join(out.flatten(0, 1))).view(tall, wide, -1)

    def _activate(self, x: Tensor) -> Tensor:
        return activation(self.spec.first_act, x)


class BiasedConformerMlp:
    """`[rows, width]` -> `[rows, width]`; the layer adds half of the result to the rows."""

    def __init__(self, s: BiasedConformerSpec, build: Builder) -> None:
        self.act = s.act
        self.norm = build.norm("layer_norm", s.width, _EPS, True)
        self.up = build.linear(["gate_up_proj"], s.width, [2 * s.inner], True)
        self.down = build.linear(["down_proj"], s.inner, [s.width], True)

    def __call__(self, x: Tensor) -> Tensor:
        up, gate = self.up(self.norm(x)).chunk(2, -1)
        return self.down(activation(self.act, gate.contiguous()).mul_(up))


class BiasedConformerAttention:
    """Attention within segments. The table's biases are added to the scores."""

    def __init__(self, s: BiasedConformerSpec, build: Builder) -> None:
        self.spec = s
        self.qkv = build.linear(["q_proj", "k_proj", "v_proj"], s.width, [s.width] * 3, True)
        self.out = build.linear(["o_proj"], s.width, [s.width], True)

    def __call__(self, x: Tensor, segments: Sequence[int], bias: Tensor) -> Tensor:
        s, qkv, out = self.spec, self.qkv(x), torch.empty_like(x)
        for rows, target in zip(qkv.split(list(segments)), out.split(list(segments)), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in rows.view(-1, 3, s.heads, s.head_dim).unbind(1))
            scores = bias[None, :, : len(rows), : len(rows)]
            target.copy_(F.scaled_dot_product_attention(q, k, v, scores)[0].transpose(0, 1).flatten(1))
        return self.out(out)


class CausalConvolution:
    """A causal depthwise convolution over time between gated and plain linear layers."""

    def __init__(self, s: BiasedConformerSpec, build: Builder) -> None:
        self.spec, w, wide = s, s.width, s.multiplier * s.width
        self.norm = build.norm("layer_norm", w, _EPS, True)
        self.first = build.linear(["glu.ext_pw_conv_1d"], w, [2 * w], True)
        self.offsets = [build.stored(f"glu.{name}", 1, w, 1) for name in ("b1", "b2")]
        self.kernel = build.stored("dw_sep_conv_1d.dw_conv.weight", wide, 1, s.taps)
        self.bias = build.stored("dw_sep_conv_1d.dw_conv.bias", wide)
        self.join = build.linear(["dw_sep_conv_1d.pw_conv"], wide, [w], True)
        self.last = build.linear(["ext_pw_conv_1d"], w, [w], True)

    def __call__(self, x: Tensor, segments: Sequence[int]) -> Tensor:
        x, gate = self.first(self.norm(x)).chunk(2, -1)
        offset, gate_offset = (stored.weight[0, :, 0] for stored in self.offsets)
        x = activation(self.spec.gate_act, gate + gate_offset).mul_(x + offset)
        del gate
        out = self.bias.weight.repeat(len(x), 1)
        x = x if self.spec.multiplier == 1 else x.repeat_interleave(self.spec.multiplier, 1)
        add_depthwise_(out, x, self.kernel.weight, segments, self.spec.taps - 1)
        del x
        return self.last(activation(self.spec.conv_act, self.join(out)))


class BiasedConformerLayer:
    def __init__(self, s: BiasedConformerSpec, build: Builder) -> None:
        self.first_mlp = BiasedConformerMlp(s, build.scope("feed_forward_in"))
        self.attention = BiasedConformerAttention(s, build.scope("self_attn"))
        self.convolution = CausalConvolution(s, build.scope("conv"))
        self.second_mlp = BiasedConformerMlp(s, build.scope("feed_forward_out"))
        self.attention_norm = build.norm("layer_norm_att", s.width, _EPS, True)
        self.norm = build.norm("layer_norm", s.width, _EPS, True)

    def __call__(self, x: Tensor, segments: Sequence[int], bias: Tensor) -> Tensor:
        x = x.add(self.first_mlp(x), alpha=0.5)
        x += self.attention(self.attention_norm(x), segments, bias)
        x += self.convolution(x, segments)
        return self.norm(x.add_(self.second_mlp(x), alpha=0.5))


class BiasedConformer(TensorModule):
    """Log-mel frames of items, concatenated, `[frames, bands]` -> `[rows, width]`."""

    def __init__(self, spec: BiasedConformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, build = spec, dtype, Builder(self, dtype, device)
        self.moments = [build.stored(f"encoder_embedding.global_{name}", spec.bands) for name in ("mean", "invstd")]
        self.subsampling = Subsampling(spec, build.scope("embed"))
        self.table = build.stored(
            "relative_attention_bias_layer.bias_values.weight", spec.distances * (2 - spec.symmetric), spec.heads
        )
        self.blocks = [BiasedConformerLayer(spec, build.scope(f"encoders.{i}")) for i in range(spec.layers)]

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        mean, inverse = (stored.weight for stored in self.moments)
        x = (features.to(self.dtype) - mean).mul_(inverse)
        rows, padded = [self.spec.num_rows(n) for n in frames], list[int]()
        items = [self.subsampling(item) for item in x.split(list(frames))]
        for number, item in enumerate(items):
            more = -len(item) % _SEGMENT if len(item) > _SEGMENT else 0
            padded.append(len(item) + more)
            items[number] = F.pad(item, (0, 0, 0, more))
        segments = [size for n in padded for size in ([_SEGMENT] * (n // _SEGMENT) if n > _SEGMENT else [n])]
        x = torch.cat(items)
        del items, item
        bias = self._bias(max(segments))
        for block in self.blocks:
            x = block(x, segments, bias)
        if padded == rows:
            return x
        return torch.cat([item[:n] for item, n in zip(x.split(padded), rows, strict=True)])

    def _bias(self, rows: int) -> Tensor:
        """Return what is added to the scores of `rows` queries and keys: `[heads, queries, keys]`."""
        s, position = self.spec, torch.arange(rows, device=self.table.weight.device)
        distance = position - position[:, None]
        if s.symmetric:
            number = distance.abs_().clamp_(max=s.distances - 1)
        else:
            number = distance.clamp_(-s.distances, s.distances - 1).add_(s.distances)
        return self.table.weight[number].permute(2, 0, 1).contiguous()


def biased_conformer_bytes(c: BiasedConformerSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in BiasedConformer for `rows` rows in one call, inputs included."""
    ops, s, w = OpBytes(dtype, limits), dtype.itemsize, c.width
    padded = rows if rows <= _SEGMENT else -(-rows // _SEGMENT) * _SEGMENT
    features = rows * c.reduction * c.bands * s
    segment = min(padded, _SEGMENT)
    table, distances = c.heads * segment**2 * s, segment**2 * 8
    mlp = 2 * w * s + max(ops.linear(w, 2 * c.inner, padded), 4 * c.inner * s, 3 * c.inner * s + ops.linear(c.inner, w, padded))
    attention = 2 * w * s + max(ops.linear(w, 3 * w, padded) + w * s, 4 * w * s + ops.linear(w, w, padded))
    convolution = 2 * w * s + (3 + 2 * c.multiplier) * w * s
    layers = padded * max(mlp, attention, convolution) + table + ops.torch_attention_tiles(segment, c.head_dim)
    biases = table + distances + max(table, distances)
    subsampled = features + max(rows * w * s + _subsampling_bytes(c, min(rows, _BLOCK), ops), 2 * padded * w * s)
    return SMALL + features + max(subsampled, padded * w * s + max(layers, biases))


def _subsampling_bytes(c: BiasedConformerSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in a block of Subsampling, the result of the block before included."""
    s, most, raw, padded = ops.dtype.itemsize, 0, 0, 0
    for level in range(1, c.halvings + 1):
        tall = (rows + 1) * (1 << (c.halvings - level)) - 1
        places = tall * c.bands_after(level)
        result, product = places * c.channels * s, places * ops.linear(9 if level == 1 else c.channels, c.channels, places)
        if level == 1:
            frames = (2 * tall + 1) * (c.bands + 2) * s
            alive = frames + max(places * 9 * s + product, 2 * result)
        else:
            alive = max(raw + padded, padded + result, result + max(product, 2 * result))
        most, raw, padded = max(most, alive), result, (tall + 2) * (c.bands_after(level) + 2) * c.channels * s
    return most + rows * c.width * s
