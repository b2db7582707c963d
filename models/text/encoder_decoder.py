"""The decoder of an encoder-decoder model: self-attention to its tokens, then cross-attention to encoder rows.

Sources: arXiv 1706.03762 (the layer), 2212.04356 and 2001.08210 (norms before each part, positions from a table).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ...kernels.attention import attention_weights, paged_attention
from ...kernels.metadata import AttentionMetadata
from ..interface import AttentionCapture, CacheSpec, ForwardBatch, StepLimits
from ..layers.basic import Embedding, Norm, TensorModule
from ..layers.linear import Linear
from ..memory_formulas import SMALL, OpBytes

LayerCapture = tuple[AttentionCapture, list[int], list[int]]
"""A capture, the indices of its heads that are in one layer, and their numbers in this layer."""


@dataclass(frozen=True)
class CrossDecoderSpec:
    """A whole decoder stack with cross-attention.

    Args:
        positions: length of the position table. first_position: its row for position 0.
        embed_scale: factor of token embeddings. embed_norm: the input of the first layer is normed.
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
    embed_scale: float = 1.0
    embed_norm: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


class CrossDecoderSelfAttention(TensorModule):
    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = (3, c.heads, c.head_dim)
        shards = dict.fromkeys(("q_proj", "k_proj", "v_proj"), c.hidden_size)
        self.qkv = Linear(c.hidden_size, shards, True, dtype, device)
        self.out = Linear(c.hidden_size, {"out_proj": c.hidden_size}, True, dtype, device)

    def forward(self, x: Tensor, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(x).view(-1, *self.shape).unbind(1)
        return self.out(paged_attention(q, k, v, cache, attn, self.shape[2] ** -0.5).flatten(1))


class CrossDecoderCrossAttention(TensorModule):
    """Cross-attention. Keys and values are computed from the encoder rows of a step, once, and stay in the cache."""

    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.dim = c.heads, c.head_dim
        self.q = Linear(c.hidden_size, {"q_proj": c.hidden_size}, True, dtype, device)
        self.kv = Linear(c.hidden_size, dict.fromkeys(("k_proj", "v_proj"), c.hidden_size), True, dtype, device)
        self.out = Linear(c.hidden_size, {"out_proj": c.hidden_size}, True, dtype, device)

    def forward(
        self, x: Tensor, rows: Tensor | None, cache: Tensor, attn: AttentionMetadata, captures: Sequence[LayerCapture]
    ) -> Tensor:
        q = self.q(x).view(-1, self.heads, self.dim)
        if rows is None:
            k = v = q[:0]
        else:
            k, v = self.kv(rows.to(x.dtype)).view(-1, 2, self.heads, self.dim).unbind(1)
        attended = paged_attention(q, k, v, cache, attn, self.dim**-0.5)
        for capture, index, heads in captures:
            capture.weights[index] = attention_weights(q, cache, attn, capture.sequence, heads, self.dim**-0.5)
        return self.out(attended.flatten(1))


class CrossDecoderLayer(TensorModule):
    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act = c.act
        self.self_attn_layer_norm = Norm(c.hidden_size, c.eps, True, dtype, device)
        self.self_attn = CrossDecoderSelfAttention(c, dtype, device)
        self.encoder_attn_layer_norm = Norm(c.hidden_size, c.eps, True, dtype, device)
        self.encoder_attn = CrossDecoderCrossAttention(c, dtype, device)
        self.final_layer_norm = Norm(c.hidden_size, c.eps, True, dtype, device)
        self.first = Linear(c.hidden_size, {"fc1": c.inner}, True, dtype, device)
        self.second = Linear(c.inner, {"fc2": c.hidden_size}, True, dtype, device)

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        rows: Tensor | None,
        caches: tuple[Tensor, Tensor],
        attn: tuple[AttentionMetadata, AttentionMetadata],
        captures: Sequence[LayerCapture] = (),
    ) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the MLP's output, which the next layer adds."""
        add = self.self_attn(self.self_attn_layer_norm(x, add), caches[0], attn[0])
        add = self.encoder_attn(self.encoder_attn_layer_norm(x, add), rows, caches[1], attn[1], captures)
        return self.second(activation(self.act, self.first(self.final_layer_norm(x, add))))


class CrossDecoder(TensorModule):
    """ForwardBatch -> normed hidden states `[rows, hidden]`. Each layer has two caches, for tokens and for encoder rows."""

    def __init__(self, c: CrossDecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = c
        self.cache_specs = [CacheSpec(kind, c.heads, c.head_dim, dtype) for _ in range(c.layers) for kind in ("full", "cross")]
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype, device)
        self.embed_positions = Embedding(c.positions + c.first_position, c.hidden_size, dtype, device)
        self.layernorm_embedding = Norm(c.hidden_size, c.eps, True, dtype, device) if c.embed_norm else nn.Identity()
        self.layers = nn.ModuleList(CrossDecoderLayer(c, dtype, device) for _ in range(c.layers))
        self.layer_norm = Norm(c.hidden_size, c.eps, True, dtype, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        c, add = self.config, None
        x = self.embed_tokens(batch.input_ids) * c.embed_scale + self.embed_positions(batch.positions[0] + c.first_position)
        x = self.layernorm_embedding(x)
        pairs = zip(batch.kv_caches[::2], batch.kv_caches[1::2], strict=True)
        metas = zip(batch.attn[::2], batch.attn[1::2], strict=True)
        for number, (layer, caches, attn) in enumerate(zip(self.layers, pairs, metas, strict=True)):
            add = layer(x, add, batch.cross_rows, caches, attn, _captures_of_layer(batch.captures, number))
        return self.layer_norm(x, add)


def _captures_of_layer(captures: Sequence[AttentionCapture], layer: int) -> list[LayerCapture]:
    found = []
    for one in captures:
        index = [i for i, (number, _) in enumerate(one.heads) if number == layer]
        if index:
            found.append((one, index, [one.heads[i][1] for i in index]))
    return found


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
    added, inner = ops.linear_result(w, rows), ops.linear_result(c.inner, rows)
    held = row + added  # x, and the output that is added to it next
    inputs = rows * (8 + 8 + 8 + 40) + limits.keys * row  # ids, positions, slots, bounds and block tables; encoder rows
    result = row + ops.linear(w, w, rows)
    qkv = max(ops.linear(w, 3 * w, rows), ops.linear_result(3 * w, rows) + result)
    self_attention = held + row + qkv
    written = limits.keys * ops.linear(w, 2 * w, limits.keys)
    read = rows * result + limits.keys * ops.linear_result(2 * w, limits.keys)
    cross_attention = rows * (held + added + row + added) + max(written, read)
    first, second = ops.linear(w, c.inner, rows), ops.linear(c.inner, w, rows)
    mlp = held + added + max(row + first, 2 * inner, inner + second)
    gathered = 0
    if not ops.fused("attention"):
        copies = 2 * limits.keys * w * (2 * s + limits.quantized_kv * (1 + ops.float32_copy))
        gathered = copies + rows * (limits.longest * (1 + s) + 3 * row)  # masks; rows in the layout of torch's kernels
    return SMALL + inputs + max(rows * max(self_attention, mlp), cross_attention) + gathered
