"""The decoder of an encoder-decoder model: self-attention to its tokens, then cross-attention to encoder rows.

Sources: arXiv 1706.03762 (the layer), 2212.04356 and 2001.08210 (norms before each part, positions from a table).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...kernels.activation import act_and_mul, activation
from ...kernels.attention import attention_weights, paged_attention
from ...kernels.dispatch import backend
from ...kernels.metadata import AttentionMetadata
from ...kernels.rope import rotate_
from ..interface import AttentionCapture, CacheSpec, ForwardBatch, StepLimits
from ..layers.basic import Converter, Convertible, EmbeddingTable, Norm, TensorModule
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from .rope import CosSin, Rotary
from .spec import RopeSpec

LayerCapture = tuple[AttentionCapture, list[int], list[int]]
"""A capture, the indices of its heads that are in one layer, and their numbers in this layer."""


@dataclass(frozen=True)
class CrossInputs:
    """The inputs of a layer's cross-attention.

    Args:
        rows: encoder rows that this step adds to the cache, `[rows, hidden]`; None if it adds none.
        cache, attn: the layer's cache of the encoder's keys and values, and how the step reads it.
        captures: the heads whose attention weights are kept.
    """

    rows: Tensor | None
    cache: Tensor
    attn: AttentionMetadata
    captures: Sequence[LayerCapture] = ()


@dataclass(frozen=True)
class CrossDecoderNames:
    """Names of the parts of a layer and of the final norm in the checkpoint."""

    norms: tuple[str, str, str] = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    out: str = "out_proj"
    mlp: tuple[str, str] = ("fc1", "fc2")
    end: str = "layer_norm"


@dataclass(frozen=True)
class CrossDecoderSpec:
    """A whole decoder stack with cross-attention.

    Args:
        positions: length of the position table. first_position: its row for position 0. learned_positions: there is a table.
        embed_scale: factor of token embeddings. embed_norm: the input of the first layer is normed.
        rope: rotary positions of self-attention, in place of the table.
        bias: norms have a bias, and the projections of attention unless attention_bias is False. qkv_bias: queries, keys and
            values have one also without it.
        gated: the MLP is `fc2(act(gate(x)) * up(x))`, and fc1 stores up and gate as one matrix.
        post_norm: layers norm the residual stream after each part, and no norm follows the last one.
        attention_dim: numbers per head; None: `hidden_size // heads`. kv_heads: heads of keys and values; None: `heads`.
    """

    vocab_size: int
    hidden_size: int
    inner: int
    heads: int
    layers: int
    positions: int
    act: str = "gelu"
    eps: float = 1e-5
    first_position: int = 0
    learned_positions: bool = True
    embed_scale: float = 1.0
    embed_norm: bool = False
    rope: RopeSpec | None = None
    bias: bool = True
    qkv_bias: bool = False
    gated: bool = False
    attention_dim: int | None = None
    kv_heads: int | None = None
    attention_bias: bool = True
    post_norm: bool = False
    names: CrossDecoderNames = CrossDecoderNames()

    @property
    def head_dim(self) -> int:
        return self.attention_dim or self.hidden_size // self.heads

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def key_shards(self) -> dict[str, int]:
        """Widths of the projections of keys and values."""
        return dict.fromkeys(("k_proj", "v_proj"), self.keys * self.head_dim)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Return two flags: queries, keys and values have a bias; the output projection of attention has one."""
        bias = self.bias and self.attention_bias
        return bias or self.qkv_bias, bias


class CrossDecoderSelfAttention(TensorModule):
    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = (c.heads, c.keys, c.keys), c.head_dim, c.rope
        qkv_bias, out_bias = c.biases
        self.qkv = Linear(c.hidden_size, {"q_proj": c.attention_width, **c.key_shards}, qkv_bias, dtype, device)
        self.out = Linear(c.attention_width, {c.names.out: c.hidden_size}, out_bias, dtype, device)

    def forward(self, x: Tensor, cos_sin: CosSin | None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, self.dim).split(self.heads, 1)
        if self.rope is not None and cos_sin is not None:
            for part in (q, k):
                rotate_(part[..., : self.rope.dim], *cos_sin[:2], self.rope.interleaved)
        return self.out(paged_attention(q, k, v, cache, attn, self.dim**-0.5).flatten(1))


class CrossDecoderCrossAttention(TensorModule):
    """Cross-attention. Keys and values are computed from the encoder rows of a step, once, and stay in the cache."""

    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.keys, self.dim = c.heads, c.keys, c.head_dim
        qkv_bias, out_bias = c.biases
        self.q = Linear(c.hidden_size, {"q_proj": c.attention_width}, qkv_bias, dtype, device)
        self.kv = Linear(c.hidden_size, c.key_shards, qkv_bias, dtype, device)
        self.out = Linear(c.attention_width, {c.names.out: c.hidden_size}, out_bias, dtype, device)

    def forward(self, x: Tensor, cross: CrossInputs) -> Tensor:
        q = self.q(x).view(-1, self.heads, self.dim)
        if cross.rows is None:
            k = v = q[:0, : self.keys]
        else:
            k, v = self.kv(cross.rows.to(x.dtype)).view(-1, 2, self.keys, self.dim).unbind(1)
        attended = paged_attention(q, k, v, cross.cache, cross.attn, self.dim**-0.5)
        for capture, index, heads in cross.captures:
            capture.weights[index] = attention_weights(q, cross.cache, cross.attn, capture.sequence, heads, self.dim**-0.5)
        return self.out(attended.flatten(1))


class CrossDecoderLayer(TensorModule, Convertible):
    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act, self.gated = c.act, c.gated
        self.up, down = c.names.mlp
        first, middle, last = c.names.norms
        norm = partial(Norm, c.hidden_size, c.eps, c.bias, dtype, device, centered=True)
        self.self_attn_layer_norm = norm(stored=first)
        self.self_attn = CrossDecoderSelfAttention(c, dtype, device)
        self.encoder_attn_layer_norm = norm(stored=middle)
        self.encoder_attn = CrossDecoderCrossAttention(c, dtype, device)
        self.final_layer_norm = norm(stored=last)
        parts = (f"{self.up}.gate", f"{self.up}.up") if c.gated else (self.up,)
        self.first = Linear(c.hidden_size, dict.fromkeys(parts, c.inner), True, dtype, device)
        self.second = Linear(c.inner, {down: c.hidden_size}, True, dtype, device)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters that split a gated MLP's first matrix and bias."""
        for kind in ("weight", "bias") if self.gated else ():
            yield f"{path}.{self.up}.{kind}", partial(_split_gate, f"{path}.{self.up}", kind)

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        cross: CrossInputs,
    ) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the MLP's output, which the next layer adds."""
        add = self.self_attn(self.self_attn_layer_norm(x, add), cos_sin, cache, attn)
        add = self.encoder_attn(self.encoder_attn_layer_norm(x, add), cross)
        hidden = self.first(self.final_layer_norm(x, add))
        return self.second(act_and_mul(self.act, hidden) if self.gated else activation(self.act, hidden))


class PostNormCrossDecoderLayer(CrossDecoderLayer):
    """A layer that norms the residual stream after each part (BART)."""

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        cross: CrossInputs,
    ) -> Tensor:
        """Return the residual stream after the layer. `add`: None."""
        x = self.self_attn_layer_norm(x, self.self_attn(x, cos_sin, cache, attn))
        x = self.encoder_attn_layer_norm(x, self.encoder_attn(x, cross))
        return self.final_layer_norm(x, self.second(activation(self.act, self.first(x))))


class CrossDecoder(TensorModule):
    """ForwardBatch -> normed hidden states `[rows, hidden]`. Each layer has two caches, for tokens and for encoder rows."""

    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = c
        self.cache_specs = [CacheSpec(kind, c.keys, c.head_dim, dtype) for _ in range(c.layers) for kind in ("full", "cross")]
        self.embed_tokens = EmbeddingTable(c.vocab_size, c.hidden_size, dtype, device)
        self.rotary = None if c.rope is None else Rotary(c.rope, device)
        self.has_table = c.rope is None and c.learned_positions
        self.embed_positions = (
            EmbeddingTable(c.positions + c.first_position, c.hidden_size, dtype, device) if self.has_table else nn.Identity()
        )
        self.layernorm_embedding = Norm(c.hidden_size, c.eps, True, dtype, device) if c.embed_norm else nn.Identity()
        kind = PostNormCrossDecoderLayer if c.post_norm else CrossDecoderLayer
        self.layers = nn.ModuleList(kind(c, dtype, device) for _ in range(c.layers))
        end = None if c.post_norm else Norm(c.hidden_size, c.eps, c.bias, dtype, device, stored=c.names.end, centered=True)
        self.layer_norm = end

    def forward(self, batch: ForwardBatch) -> Tensor:
        c, add = self.config, None
        x = self.embed_tokens(batch.input_ids) * c.embed_scale
        cos_sin = None if self.rotary is None else self.rotary(batch.positions)
        if self.has_table:
            x = x + self.embed_positions(batch.positions[0] + c.first_position)
        x = self.layernorm_embedding(x)
        pairs = zip(batch.kv_caches[::2], batch.kv_caches[1::2], strict=True)
        metas = zip(batch.attn[::2], batch.attn[1::2], strict=True)
        for number, (layer, caches, attn) in enumerate(zip(self.layers, pairs, metas, strict=True)):
            cross = CrossInputs(batch.cross_rows, caches[1], attn[1], _captures_of_layer(batch.captures, number))
            out = layer(x, add, cos_sin, caches[0], attn[0], cross)
            x, add = (out, None) if c.post_norm else (x, out)
        return x if self.layer_norm is None else self.layer_norm(x, add)


def _split_gate(name: str, kind: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    up, gate = tensor.chunk(2)
    return [(f"{name}.gate.{kind}", gate), (f"{name}.up.{kind}", up)]


def _captures_of_layer(captures: Sequence[AttentionCapture], layer: int) -> list[LayerCapture]:
    of_layer = []
    for capture in captures:
        index = [i for i, (number, _) in enumerate(capture.heads) if number == layer]
        if index:
            of_layer.append((capture, index, [capture.heads[i][1] for i in index]))
    return of_layer


def with_key_biases(weights: Iterable[tuple[str, Tensor]], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Add a bias of zeros for each key projection, which checkpoints leave out, so that q, k and v are one product.

    `prefix`: start of the decoder's names in the checkpoint.
    """
    for name, tensor in weights:
        yield name, tensor
        if name.startswith(prefix) and name.endswith((".k_proj.weight", ".k_proj.weight_packed")):
            dtype = tensor.dtype if tensor.itemsize > 1 and tensor.is_floating_point() else torch.float32  # 8 bits: quantised
            yield f"{name.rpartition('.')[0]}.bias", torch.zeros(len(tensor), dtype=dtype, device=tensor.device)


def cross_decoder_bytes(c: CrossDecoderSpec, limits: StepLimits, dtype: torch.dtype) -> int:
    """Return the bytes alive in CrossDecoder, for its rows and the encoder rows whose keys are written in the step."""
    ops = OpBytes(dtype, limits)
    s, w, rows = dtype.itemsize, c.hidden_size, limits.rows
    row = w * s
    wide, a, kv = (1 + c.gated) * c.inner, c.attention_width, 2 * c.keys * c.head_dim
    added, inner = ops.linear_result(w, rows), ops.linear_result(c.inner, rows)
    base = row + added  # x, and the output that is added to it next
    inputs = rows * (8 + 8 + 8 + 40) + limits.keys * row  # ids, positions, slots, bounds and block tables; encoder rows
    result = a * s + ops.linear(a, w, rows)
    qkv = max(ops.linear(w, a + kv, rows), ops.linear_result(a + kv, rows) + result)
    if c.rope is not None:
        base += c.rope.dim * FLOAT32  # cosines and sines
        if backend("rotary", limits.device, dtype) != "native":
            qkv = max(qkv, ops.linear_result(a + kv, rows) + ops.torch_rotary(c.heads * c.rope.dim))
    self_attention = base + row + qkv
    written = limits.keys * ops.linear(w, kv, limits.keys)
    read = rows * result + limits.keys * ops.linear_result(kv, limits.keys)
    cross_attention = rows * (base + added + row + added) + max(written, read)
    first, second = ops.linear(w, wide, rows), ops.linear(c.inner, w, rows)
    mlp = base + added + max(row + first, ops.linear_result(wide, rows) + inner, inner + second)
    gathered = 0
    if not ops.fused("attention"):
        copies = limits.keys * kv * (2 * s + limits.quantized_kv * (1 + ops.float32_copy))
        gathered = copies + rows * (limits.longest * (1 + s) + 3 * a * s)  # masks; rows in the layout of torch's kernels
    return SMALL + inputs + max(rows * max(self_attention, mlp), cross_attention) + gathered
