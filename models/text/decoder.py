"""The decoder-only stack over a paged KV cache, built from a DecoderSpec."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ...kernels.attention import paged_attention
from ...kernels.metadata import AttentionMetadata
from ...kernels.qkv_prepare import prepare_qkv
from ...kernels.rope import rotate_
from ...kernels.scatter import scatter_rows_
from ..interface import CacheSpec, ForwardBatch, StepLimits
from ..layers.basic import AddResidual, Embedding, Norm, Scale, TensorModule
from ..layers.builder import StoredTensor
from ..layers.linear import Linear
from ..layers.mla import LatentAttention, latent_attention_bytes
from ..layers.mlp import GatedMlp, PlainMlp, gated_mlp_bytes
from ..layers.moe import Mixture, ModalityMixture, mixture_bytes
from ..memory_formulas import FLOAT32, OpBytes
from .rope import CosSin, Rotary
from .spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec

_SPLIT_KV_BYTES = 64 << 20  # 256 multiprocessors with two tiles of at most 128 KiB each


class DecoderAttention(TensorModule):
    """Grouped-query attention. Norm, rotation and the write to the cache are one kernel call."""

    def __init__(self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        self.qkv_heads, self.dim = (heads, kv_heads, kv_heads), dim
        self.scale, self.soft_cap, self.qk_norm = spec.scale, spec.soft_cap, spec.qk_norm
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        shards = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if spec.fused:
            shards = {"qkv_proj": sum(shards.values())}
        self.qkv = Linear(stack.hidden_size, shards, spec.bias, dtype, device)
        self.out = Linear(heads * dim, {"o_proj": stack.hidden_size}, spec.out_bias, dtype, device)
        self.sinks = StoredTensor((heads,), torch.float32, device) if spec.sinks else None
        self.cache_spec = CacheSpec("full" if spec.window is None else "window", kv_heads, dim, dtype, spec.window)
        if spec.qk_norm is not None:
            q, k = (heads * dim, kv_heads * dim) if spec.qk_norm == "all" else (dim, dim)
            names = ("query_layernorm", "key_layernorm") if spec.qk_norm == "rotated" else ("q_norm", "k_norm")
            norm = partial(Norm, eps=stack.eps, bias=False, dtype=dtype, device=device, offset=stack.norm_offset)
            self.q_norm, self.k_norm = (norm(width, stored=name) for width, name in zip((q, k), names, strict=True))

    def forward(self, x: Tensor, cos_sin: CosSin | None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)  # [rows, heads + 2 * kv_heads, dim]
        norms, rotation = None, None if cos_sin is None else cos_sin[:2]
        if self.qk_norm == "rotated" and rotation is not None:
            rotate_(qkv[:, : -self.qkv_heads[2], : 2 * rotation[0].shape[1]], *rotation, self.interleaved)
            rotation = None
        if self.qk_norm == "all":  # all heads of a row are normed together
            for part, norm in zip(qkv.split(self.qkv_heads, 1), (self.q_norm, self.k_norm), strict=False):
                norm.heads_(part.flatten(1)[:, None])
        elif self.qk_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset
        q, k, v = prepare_qkv(qkv, cache, attn, rotation, self.interleaved, norms)
        if cos_sin is not None and cos_sin.query_scale is not None:
            q.mul_(cos_sin.query_scale.to(q.dtype)[:, None, None])
        sinks = None if self.sinks is None else self.sinks.weight
        return self.out(paged_attention(q, k, v, cache, attn, self.scale, self.soft_cap, sinks).flatten(1))


class DecoderLayer(TensorModule):
    """Attention and MLP, with norms before or after each; some stacks scale their outputs."""

    def __init__(self, spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.self_attn = _attention(spec, stack, dtype, device)
        self.mlp = build_mlp(spec, stack, dtype, device)
        self.parallel = spec.parallel
        norms = [None if name is None else _norm(stack, dtype, device, name) for name in spec.norms]
        self.before_attention, self.before_mlp = norms[0] or AddResidual(), norms[2] or AddResidual()
        self.adjusts_outputs = norms[1] is not None or stack.residual_scale != 1.0
        if self.adjusts_outputs:
            self.after_attention = norms[1] or Scale(stack.residual_scale)
            self.after_mlp = norms[3] or Scale(stack.residual_scale)

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        modality_ids: Tensor | None,
    ) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the MLP's output, which the next layer adds."""
        if self.parallel:
            normed = self.before_attention(x, add)
            return self.self_attn(normed, cos_sin, cache, attn).add_(self.mlp(normed, modality_ids))
        add = self.self_attn(self.before_attention(x, add), cos_sin, cache, attn)
        if self.adjusts_outputs:
            add = self.after_attention(add)
        add = self.mlp(self.before_mlp(x, add), modality_ids)
        return self.after_mlp(add) if self.adjusts_outputs else add


class Decoder(TensorModule):
    """ForwardBatch -> normed hidden states `[rows, hidden]`."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype, device, spec.embed_scale)
        layers = [DecoderLayer(layer, spec, dtype, device) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self.norm = _norm(spec, dtype, device)
        self.cache_specs = [layer.self_attn.cache_spec for layer in layers]
        self.rotaries = [Rotary(rope, device) for rope in spec.ropes]
        self.rope_of_layer = [spec.ropes.index(a.rope) if a.rope is not None else -1 for a in spec.attentions]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        levels = self._put_encoder_rows(x, batch)
        cos_sin = [*(rotary(batch.positions) for rotary in self.rotaries), None]  # -1: no positions
        add, modality_ids = None, batch.modality_ids
        steps = zip(self.layers, self.rope_of_layer, batch.kv_caches, batch.attn, strict=True)
        for i, (layer, rope, cache, attn) in enumerate(steps):
            add = layer(x, add, cos_sin[rope], cache, attn, modality_ids)
            if batch.embed_index is not None and i in levels:
                scatter_rows_(x.add_(add), batch.embed_index, levels[i], add=True)
                add = None
        return self.norm(x, add)

    def _put_encoder_rows(self, x: Tensor, batch: ForwardBatch) -> dict[int, Tensor]:
        """Replace rows of `x` by encoder rows; return their deepstack levels `[n, hidden]` by the layer each follows."""
        if batch.embed_index is None or batch.embed_rows is None:
            return {}
        first, *levels = batch.embed_rows.split(x.shape[1], 1)
        scatter_rows_(x, batch.embed_index, first)
        return dict(zip(self.spec.deepstack, levels, strict=True))


def _norm(stack: DecoderSpec, dtype: torch.dtype, device: torch.device, stored: str | None = None) -> Norm:
    bias, centered = stack.norm == "layer", stack.norm != "rms"
    return Norm(stack.hidden_size, stack.eps, bias, dtype, device, offset=stack.norm_offset, stored=stored, centered=centered)


def _attention(
    spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> DecoderAttention | LatentAttention:
    if isinstance(spec.attention, AttentionSpec):
        return DecoderAttention(spec.attention, stack, dtype, device)
    return LatentAttention(stack.hidden_size, spec.attention, dtype, device)


def build_mlp(spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> TensorModule:
    """Return the MLP or the mixture of experts of a layer."""
    m = spec.mlp
    if isinstance(m, MlpSpec):
        if m.plain is not None:
            return PlainMlp(stack.hidden_size, m.inner, m.bias, dtype, device, m.act, m.plain)
        return GatedMlp(stack.hidden_size, m.inner, m.bias, dtype, device, act=m.act, fused=m.fused)
    mixture = Mixture if len(m.modality_experts) == 1 else ModalityMixture
    return mixture(stack.hidden_size, m, dtype, device)


def decoder_bytes(
    c: DecoderSpec, limits: StepLimits, dtype: torch.dtype, adapters: tuple[int, int] = (0, 0), encoders: bool = True
) -> int:
    """Return the bytes alive in Decoder, without gathered keys.

    Args:
        adapters: their bytes per row in attention, in the MLP.
        encoders: rows of a step may be encoder rows.
    """
    ops = OpBytes(dtype, limits)
    row, added = c.hidden_size * dtype.itemsize, ops.linear_result(c.hidden_size, limits.rows)
    step = 8 + 8 * c.rope_axes + 8 + 40 + row  # ids, positions, slots, bounds and block tables, x
    step += encoders * (8 + (1 + len(c.deepstack)) * row)  # indices and content of encoder rows
    step += sum(rope.dim * FLOAT32 for rope in c.ropes)  # cosines and sines
    attention = added + row + max(_part_bytes(c.hidden_size, layer.attention, ops) for layer in c.layers)
    mlp = 2 * added + row + max(_part_bytes(c.hidden_size, layer.mlp, ops) for layer in c.layers)
    # alive beside attention: its normed input and the previous output; beside the MLP also attention's output
    parts = max(attention + adapters[0], mlp + adapters[1])
    return limits.rows * (step + max(2 * row + ops.norm(c.hidden_size, True), parts))


def _part_bytes(width: int, part: AttentionSpec | LatentSpec | MlpSpec | MoeSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in attention or MLP, without its normed input."""
    if isinstance(part, AttentionSpec):
        return _attention_bytes(width, part, ops)
    if isinstance(part, LatentSpec):
        return latent_attention_bytes(part, ops)
    if isinstance(part, MlpSpec):
        return gated_mlp_bytes(width, part.inner, ops)
    return mixture_bytes(width, part, ops)


def _attention_bytes(width: int, a: AttentionSpec, ops: OpBytes) -> int:
    s, q, kv = ops.dtype.itemsize, a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = ops.linear_result(q + 2 * kv, ops.limits.rows)
    peak = qkv + q * s + ops.linear(q, width, ops.limits.rows)
    if not ops.fused("rms_norm") and a.qk_norm:
        peak = max(peak, qkv + ops.torch_rms_norm(q))
    if not ops.fused("rotary"):
        peak = max(peak, qkv + ops.torch_rotary(q + kv))
    if not ops.fused("attention"):
        peak = max(peak, qkv + 3 * q * s)  # queries and result in the layout of torch's kernels
    return max(peak, ops.linear(width, q + 2 * kv, ops.limits.rows))


def gathered_bytes(c: DecoderSpec, limits: StepLimits, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values that torch's attention copies out of the cache for a layer, and of its masks.

    Triton splits long sequences instead and holds float32 results of a few tiles of rows per multiprocessor.
    """
    ops = OpBytes(dtype, limits)
    if ops.fused("attention"):
        return 0 if limits.device.type == "cpu" else _SPLIT_KV_BYTES
    s = dtype.itemsize
    widths = [2 * a.kv_heads * a.head_dim if isinstance(a, AttentionSpec) else a.latent + a.rope.dim for a in c.attentions]
    dequantised = limits.quantized_kv * (1 + ops.float32_copy)
    copies = limits.keys * max(widths) * (2 * s + dequantised)  # padded to at most twice the length
    copies += ops.torch_attention_tiles(limits.rows, max(widths) // 2)
    return copies + limits.rows * limits.longest * max(_score_bytes(a, s) for a in c.attentions)


def _score_bytes(a: AttentionSpec | LatentSpec, s: int) -> int:
    """Return the bytes per row and key: a bool mask and its copy in the model's dtype (per head if windowed), capped scores."""
    if isinstance(a, LatentSpec) or (a.window is None and a.soft_cap is None and not a.sinks):
        return 1 + s
    explicit = a.heads * (s + (3 + a.sinks) * FLOAT32) if a.sinks or a.soft_cap is not None else 0
    return a.heads // a.kv_heads * (1 + s) + explicit
