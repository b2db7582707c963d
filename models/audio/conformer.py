"""The conformer: each layer has two half-weighted MLPs around blockwise attention and a convolution over time.

Sources: arXiv 2005.08100 (the layer), arXiv 1803.02155 (relative positions). After half of the layers, the probabilities of
characters that a CTC head predicts are projected back and added to the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int
from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.convolution import add_depthwise_
from ..memory_formulas import OpBytes

EPS = 1e-5


@dataclass(frozen=True)
class ConvolutionNames:
    """Names of the parts of ConformerConvolution in the checkpoint."""

    norm: str = "norm"
    up: str = "up_conv"
    kernel: str = "depth_conv.conv"
    batch_norm: str = "batch_norm"
    down: str = "down_conv"


@dataclass(frozen=True)
class ConvolutionSpec:
    """A depthwise convolution between two pointwise layers.

    Args:
        inner: channels of the depthwise convolution. taps: rows that it sees.
        bias, kernel_bias: the pointwise layers, or the depthwise one, have biases.
        layer_norm: the norm after the depthwise convolution is over the channels of a row, not over a batch of the training.
    """

    width: int
    inner: int
    taps: int
    names: ConvolutionNames = ConvolutionNames()
    act: str = "silu"
    bias: bool = True
    kernel_bias: bool = False
    layer_norm: bool = False


@dataclass(frozen=True)
class ConformerSpec:
    """The conformer.

    Args:
        inputs: numbers per input row.
        inner: width of the MLPs. conv_width: channels of the convolution. kernel_size: its taps, in rows.
        block: number of rows that attend to each other. max_distance: largest relative distance in the table.
        characters: outputs of the CTC head.
        states: numbers of earlier states (0 before the first layer, i after layer i) that precede the last one in a result row.
    """

    inputs: int
    width: int
    inner: int
    heads: int
    head_dim: int
    layers: int
    conv_width: int
    kernel_size: int
    block: int
    max_distance: int
    characters: int
    states: tuple[int, ...] = ()

    @property
    def row_width(self) -> int:
        """Numbers of a result row."""
        return self.width * (1 + len(self.states))


def conformer_spec(audio: Mapping[str, Any]) -> ConformerSpec:
    """Read the raw `encoder_config`; ConfigError for a missing key, or blocks that exceed the table of distances."""
    width, heads = positive_int(audio, "hidden_dim"), positive_int(audio, "num_heads")
    block, max_distance = positive_int(audio, "context_size"), positive_int(audio, "max_pos_emb")
    if block > max_distance:
        raise ConfigError(f"context_size {block} of encoder_config is above max_pos_emb {max_distance}")
    return ConformerSpec(
        inputs=positive_int(audio, "input_dim"),
        width=width,
        inner=width * positive_int(audio, "feedforward_mult"),
        heads=heads,
        head_dim=audio.get("dim_head") or width // heads,
        layers=positive_int(audio, "num_layers"),
        conv_width=width * positive_int(audio, "conv_expansion_factor"),
        kernel_size=positive_int(audio, "conv_kernel_size"),
        block=block,
        max_distance=max_distance,
        characters=positive_int(audio, "output_dim"),
    )


@dataclass(frozen=True)
class ConformerMlpSpec:
    """A norm and two linear layers. `names`: of the three in the checkpoint."""

    width: int
    inner: int
    names: tuple[str, str, str] = ("pre_norm", "up_proj", "down_proj")
    act: str = "silu"
    bias: bool = True
    eps: float = EPS


class ConformerMlp:
    """`[rows, width]` -> `[rows, width]`; the layer adds half of the result to the rows."""

    def __init__(self, s: ConformerMlpSpec, build: Builder) -> None:
        norm, up, down = s.names
        self.act = s.act
        self.norm = build.norm(norm, s.width, s.eps, True)
        self.up = build.linear([up], s.width, [s.inner], s.bias)
        self.down = build.linear([down], s.inner, [s.width], s.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(activation(self.act, self.up(self.norm(x))))


class ConformerAttention:
    """Attention within each block, with relative positions."""

    def __init__(self, s: ConformerSpec, build: Builder) -> None:
        self.spec, inner = s, s.heads * s.head_dim
        self.norm = build.norm("pre_norm", s.width, EPS, True)
        self.qkv = build.linear(["to_q", "to_kv"], s.width, [inner, 2 * inner], False)
        self.out = build.linear(["to_out"], inner, [s.width], True)
        self.distances = build.stored("rel_pos_emb.weight", 2 * s.max_distance + 1, s.head_dim)

    def __call__(self, x: Tensor, blocks: Sequence[int]) -> Tensor:
        s, qkv = self.spec, self.qkv(self.norm(x))
        position = torch.arange(min(s.block, len(x)), device=x.device)
        distances = self.distances.weight[position[:, None] - position + s.max_distance]  # [rows, keys, head_dim]
        out = qkv.new_empty(len(x), s.heads * s.head_dim)
        for rows, target in zip(qkv.split(list(blocks)), out.split(list(blocks)), strict=True):
            target.copy_(self._block(rows, distances))
        return self.out(out)

    def _block(self, rows: Tensor, distances: Tensor) -> Tensor:
        s, n = self.spec, len(rows)
        q, k, v = rows.view(n, 3, s.heads, s.head_dim).unbind(1)
        scores = torch.bmm(q, distances[:n, :n].transpose(1, 2)).transpose(0, 1) * s.head_dim**-0.5  # [heads, rows, keys]
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scores[None])[0].transpose(0, 1).flatten(1)


class ConformerConvolution:
    """A depthwise convolution over time, zero-padded per item, between two pointwise layers, the first of them gated."""

    def __init__(self, s: ConvolutionSpec, build: Builder) -> None:
        names, self.act = s.names, s.act
        self.norm = build.norm(names.norm, s.width, EPS, True)
        self.up = build.linear([names.up], s.width, [2 * s.inner], s.bias)
        self.kernel = build.stored(f"{names.kernel}.weight", s.inner, 1, s.taps)
        self.kernel_bias = build.stored(f"{names.kernel}.bias", s.inner) if s.kernel_bias else None
        parts = () if s.layer_norm else ("running_mean", "running_var", "weight", "bias")
        self.batch_norm = [build.stored(f"{names.batch_norm}.{part}", s.inner) for part in parts]
        self.layer_norm = build.norm(names.batch_norm, s.inner, EPS, True) if s.layer_norm else None
        self.down = build.linear([names.down], s.inner, [s.width], s.bias)

    def __call__(self, x: Tensor, lengths: Sequence[int], padded: Sequence[bool] = ()) -> Tensor:
        """Return the outputs. `padded`: the items whose last row is padding, which other rows see as zeros; empty: none."""
        x, gate = self.up(self.norm(x)).chunk(2, -1)
        for item in gate.split(lengths):  # per item: sigmoid's bits depend on how threads split a tensor
            item.sigmoid_()
        x = x * gate
        del gate, item  # views of the layer's whole result
        for end, is_padded in zip(accumulate(lengths), padded, strict=False):
            if is_padded:
                x[end - 1] = 0
        out = torch.zeros_like(x)
        add_depthwise_(out, x, self.kernel.weight, lengths, self.kernel.weight.shape[2] // 2)
        del x
        return self.down(activation(self.act, self._normalise(out)))

    def _normalise(self, x: Tensor) -> Tensor:
        """Add the bias of the depthwise convolution to `x`, and norm it."""
        if self.layer_norm is not None:
            return self.layer_norm(x if self.kernel_bias is None else x.add_(self.kernel_bias.weight))
        mean, variance, weight, bias = (part.weight for part in self.batch_norm)
        if self.kernel_bias is not None:
            mean = mean - self.kernel_bias.weight
        return x.sub_(mean).mul_((variance + EPS).rsqrt() * weight).add_(bias)


class ConformerLayer:
    def __init__(self, s: ConformerSpec, build: Builder) -> None:
        mlp = ConformerMlpSpec(s.width, s.inner)
        self.first_mlp = ConformerMlp(mlp, build.scope("ff1"))
        self.attention = ConformerAttention(s, build.scope("attn"))
        convolution = ConvolutionSpec(s.width, s.conv_width, s.kernel_size)
        self.convolution = ConformerConvolution(convolution, build.scope("conv"))
        self.second_mlp = ConformerMlp(mlp, build.scope("ff2"))
        self.norm = build.norm("post_norm", s.width, EPS, True)

    def __call__(self, x: Tensor, lengths: Sequence[int], blocks: Sequence[int]) -> Tensor:
        x = x.add(self.first_mlp(x), alpha=0.5)
        x = x + self.attention(x, blocks)
        x = x + self.convolution(x, lengths)
        return self.norm(x.add(self.second_mlp(x), alpha=0.5))


class Conformer(TensorModule):
    """Stacked log-mel frames of items, concatenated, `[rows, inputs]` -> `[rows, row_width]`."""

    def __init__(self, spec: ConformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, dtype, device)
        self.input = (build.linear(["input_linear"], spec.inputs, [spec.width], True),)
        self.blocks = [ConformerLayer(spec, build.scope(f"layers.{i}")) for i in range(spec.layers)]
        ctc_head = build.linear(["out"], spec.width, [spec.characters], True)
        self.ctc = (ctc_head, build.linear(["out_mid"], spec.characters, [spec.width], True))

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of stored tensors that are not used: they count training steps."""
        return tuple(f"layers.{i}.conv.batch_norm.num_batches_tracked" for i in range(self.spec.layers))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        s, (first,), (out, back) = self.spec, self.input, self.ctc
        blocks = [size for n in lengths for size in ([s.block] * (n // s.block) + [n % s.block] * (n % s.block > 0))]
        x = first(x)
        states = [x] if 0 in s.states else []
        for number, layer in enumerate(self.blocks, start=1):
            x = layer(x, list(lengths), blocks)
            if number == s.layers // 2:
                x = x + back(out(x).softmax(-1))
            if number in s.states:
                states.append(x)
        return torch.cat((*states, x), -1) if states else x


def conformer_bytes(c: ConformerSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in Conformer for `rows` rows in one call, inputs included."""
    ops, s, w, inner = OpBytes(dtype, limits), dtype.itemsize, c.width * dtype.itemsize, c.heads * c.head_dim
    mlp = max(ops.mlp(c.width, c.inner, c.inner, rows), w + ops.linear(c.width, c.inner, rows), 2 * w)
    conv = c.conv_width * s
    convolution = max(
        w + ops.linear(c.width, 2 * c.conv_width, rows),
        ops.linear_result(2 * c.conv_width, rows) + conv,  # both halves and the gated half
        3 * conv,  # the gated half, its padded copy, its convolution
        2 * conv + ops.linear(c.conv_width, c.width, rows),
    )
    attention = ops.linear_result(3 * inner, rows) + inner * s  # queries, keys, values, results
    block = c.block * c.block * (c.head_dim + 3 * c.heads) * s  # distances, their scores, and torch's copies of both
    block += ops.torch_attention_tiles(c.block, c.head_dim, c.block)
    during = max(rows * (w + ops.linear(c.width, 3 * inner, rows)), rows * attention + block)
    after = rows * (attention + ops.linear(inner, c.width, rows)) + c.block * c.block * c.head_dim * s
    characters = c.characters * s + max(c.characters * s, ops.linear(c.characters, c.width, rows))
    parts = max(rows * max(mlp, convolution, characters), c.kernel_size * conv + rows * 3 * conv, during, after)
    kept = sum(number < c.layers - 1 for number in c.states) * w  # beside the last layer, whose input may be a state, too
    joined = 2 * len(c.states) * w - kept  # states and their concatenation
    # the layer's input and the residual stream
    return rows * (c.inputs * s + 2 * w + kept) + max(parts, rows * joined)
