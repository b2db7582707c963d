"""The layers of BERT and of encoders that differ little from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....checkpoints.config import positive_int
from ....kernels.metadata import AttentionMetadata
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable, Norm, TensorModule
from ...memory_formulas import FLOAT32
from ...text.attention import DecoderAttention
from ...text.decoder import build_mlp
from ...text.rope import CosSin, Rotary
from ...text.spec import AttentionSpec, DecoderSpec, MlpSpec
from .config import BertLayout

_FURTHEST = 128  # longer distances share the last bucket

Positions = CosSin | tuple[Tensor, ...] | Tensor | None
"""What the attention of an encoder needs to know of positions."""


class BertLayer(TensorModule):
    """Attention and MLP; the residual stream is normed after each."""

    def __init__(
        self, spec: DecoderSpec, attention: Callable[..., DecoderAttention], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.self_attn = attention(cast(AttentionSpec, spec.layers[0].mixer), spec, dtype, device)
        self.mlp = build_mlp(cast(MlpSpec, spec.layers[0].mlp), spec, dtype, device)
        self.after_attention = Norm(spec.hidden_size, spec.eps, True, dtype, device)
        self.after_mlp = Norm(spec.hidden_size, spec.eps, True, dtype, device)

    def forward(self, x: Tensor, positions: Positions, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        x = self.after_attention(x, self.self_attn(x, positions, cache, attn))
        return self.after_mlp(x, self.mlp(x))


class RelativeAttention(DecoderAttention):
    """Attention within each prompt of a step, with a bias of the scores that depends on the distance. The cache is not used."""

    def forward(self, x: Tensor, positions: Positions, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Attend. `positions`: the bias `[heads, longest prompt, longest prompt]`."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, -1, self.dim).permute(1, 2, 0, 3)  # [heads, rows, dim]
        out = torch.empty_like(q)
        for start, stop in pairwise(attn.query_start_loc):
            rows, bias = slice(start, stop), cast(Tensor, positions)[:, : stop - start, : stop - start]
            out[:, rows] = F.scaled_dot_product_attention(q[:, rows], k[:, rows], v[:, rows], bias, scale=self.scale)
        return self.out(out.transpose(0, 1).flatten(1))


def distance_buckets(length: int, buckets: int, device: torch.device) -> Tensor:
    """Return the bucket of each distance from a row to a key, `[length, length]` (arXiv 1910.10683, bidirectional).

    Half of the buckets are for keys behind the row. In each half, short distances have their own bucket, and longer ones up
    to 128 share buckets of growing width.
    """
    row = torch.arange(length, device=device)
    distance, half = row[None, :] - row[:, None], buckets // 2
    far, exact = distance.abs(), half // 2
    shared = exact + (torch.log(far.clamp(min=1) / exact) / math.log(_FURTHEST / exact) * (half - exact)).long()
    return half * (distance > 0) + torch.where(far < exact, far, shared.clamp(max=half - 1))


class BertEncoder(TensorModule):
    """ForwardBatch -> hidden states `[rows, hidden]`.

    `pairs`: prompts may be pairs of texts, with token type 1 in the second. `absent`: as in Decoder; one rank holds all layers.
    """

    pairs = False
    absent: frozenset[str] = frozenset()

    def __init__(
        self, spec: DecoderSpec, layout: BertLayout, text: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.first, width = layout.first_position(text), spec.hidden_size
        self.rotary = Rotary(spec.ropes[0], device) if spec.ropes else None
        self.embed_tokens = EmbeddingTable(spec.vocab_size, width, dtype, device)
        has_table = not spec.ropes and text.get("position_biased_input", True)
        positions = positive_int(text, "max_position_embeddings") if has_table else 0
        self.embed_positions = EmbeddingTable(positions, width, dtype, device) if positions else None
        self.embed_types = EmbeddingTable(text["type_vocab_size"], width, dtype, device) if text["type_vocab_size"] else None
        self.embed_norm = Norm(width, spec.eps, True, dtype, device)
        self.position_bias = None
        if layout.relative:
            heads = cast(AttentionSpec, spec.attentions[0]).heads
            self.position_bias = EmbeddingTable(positive_int(text, "relative_attention_num_buckets"), heads, dtype, device)
        layers = self.build_layers(spec, layout, dtype, device)
        self.layers = nn.ModuleList(layers)
        self.cache_specs = [layer.self_attn.cache_spec for layer in layers]

    def build_layers(self, spec: DecoderSpec, layout: BertLayout, dtype: torch.dtype, device: torch.device) -> list[BertLayer]:
        """Return the layers of the encoder."""
        attention = RelativeAttention if layout.relative else DecoderAttention
        return [BertLayer(spec, attention, dtype, device) for _ in spec.layers]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        if self.embed_types is not None:
            types = batch.token_types if self.pairs else None
            x += self.embed_types.weight[0] if types is None else self.embed_types(types)
        table = self.embed_positions
        x = self.embed_norm(x, None if table is None else table(batch.positions[0] + self.first))
        positions = self.step_positions(batch)
        for layer, cache, attn in zip(self.layers, batch.kv_caches, batch.attn, strict=True):
            x = layer(x, positions, cache, attn)
        return x

    def step_positions(self, batch: ForwardBatch) -> Positions:
        """Return what attention needs to know of positions: cosines and sines, a bias of the scores, or nothing."""
        if self.rotary is not None:
            return self.rotary(batch.positions)
        if self.position_bias is None:
            return None
        longest = max(stop - start for start, stop in pairwise(batch.attn[0].query_start_loc))
        buckets = distance_buckets(longest, len(self.position_bias.weight), batch.input_ids.device)
        return self.position_bias(buckets).permute(2, 0, 1).contiguous()

    def position_bytes(self, limits: StepLimits) -> int:
        """Return the bytes of a bias of scores, and of the scores of a prompt."""
        if self.position_bias is None:
            return 0
        return 2 * FLOAT32 * limits.longest**2 * self.position_bias.dim
