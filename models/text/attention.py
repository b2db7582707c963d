"""Grouped-query attention and cross-attention of a decoder, over a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.activation import activation
from ...kernels.attention import paged_attention
from ...kernels.metadata import AttentionMetadata
from ...kernels.qkv_prepare import prepare_qkv
from ...kernels.rope import rotate_
from ..interface import CacheSpec, StepLimits
from ..layers.adapter import AdapterBytes
from ..layers.basic import Converter, Convertible, Norm, TensorModule
from ..layers.builder import StoredTensor
from ..layers.linear import Linear, gathered_linear
from ..layers.ranks import Ranks, Rows, building_for, current_ranks
from ..memory_formulas import FLOAT32, OpBytes
from .rope import CosSin
from .spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
)
from .tau import TauFactors, tau_bytes

_SPLIT_KV_BYTES = 64 << 20  # 256 multiprocessors with two tiles of at most 128 KiB each


class HeadNorms(Norm):
    """LayerNorm per head, without biases. Each head has weights, stored as one tensor `[heads, dim]` or head by head."""

    def __init__(self, heads: int, dim: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dim, eps, False, dtype, device)
        self.weight = torch.ones(heads, dim, dtype=dtype, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        for head, weight in enumerate(self.weight):
            yield f"{path}.{head}.weight", weight

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        yield f"{path}.weight", lambda stored: [(f"{path}.{head}.weight", weight) for head, weight in enumerate(stored)]

    def heads_(self, x: Tensor) -> None:
        """Norm each head of `x [rows, heads, dim]` in place."""
        x.copy_(F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).mul_(self.weight))


class DecoderAttention(TensorModule, Convertible):
    """Grouped-query attention. Norm, rotation and the write to the cache are one kernel call."""

    q_norm: Norm
    k_norm: Norm

    def __init__(self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ranks = ranks = _ranks_of(spec)
        heads, kv_heads, dim = spec.heads, spec.kv_heads if spec.source is None else 0, spec.head_dim
        held, held_kv = (slice(0, count) if ranks is None else _held_heads(ranks, count) for count in (heads, kv_heads))
        of_shard = {"q_proj": _rows(heads, dim, held), "gate": _rows(heads, dim, held)}
        of_shard |= dict.fromkeys(("k_proj", "v_proj"), _rows(kv_heads, dim, held_kv)) | {"g_proj": _rows(heads, 1, held)}
        if spec.fused:
            fused = _rows(heads, dim, held), *(_rows(kv_heads, dim, held_kv, heads + i * kv_heads) for i in range(2))
            of_shard["qkv_proj"] = Rows((heads + 2 * kv_heads) * dim, [rows for part in fused for rows in part.slices])
        heads, kv_heads, self.held_kv = held.stop - held.start, held_kv.stop - held_kv.start, held_kv
        self.sent_bytes = 0 if ranks is None else heads * dim * dtype.itemsize  # see ranks.rank_traffic
        self.in_scale, self.out_scale = spec.in_scale, spec.out_scale
        self.qkv_heads, self.dim, self.gated, self.head_gate = (heads, kv_heads, kv_heads), dim, spec.gated, spec.head_gate
        self.scale, self.soft_cap, self.qk_norm = spec.scale, spec.soft_cap, spec.qk_norm
        self.rotates, self.interleaved = spec.rope is not None, spec.rope is not None and spec.rope.interleaved
        self.keys_as_values, self.shares_cache = spec.keys_as_values, spec.source is not None
        self.query_latent, self.grouped = spec.query_latent, None if spec.grouped is None else (spec.grouped, spec.kv_heads)
        shards = {"q_proj": spec.query_latent or heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if spec.keys_as_values:
            del shards["v_proj"]
        if spec.fused:
            shards = {"qkv_proj": sum(shards.values())}
        if spec.gated:
            shards["gate"] = heads * dim
        if spec.head_gate:
            shards["g_proj"] = heads
        shards = {name: outputs for name, outputs in shards.items() if outputs}
        self.qkv = Linear(stack.hidden_size, shards, spec.bias, dtype, device, rows={} if ranks is None else of_shard)
        with building_for(ranks):
            self.out = gathered_linear(spec.heads * dim, ("o_proj", stack.hidden_size), spec.out_bias, dtype, device)
        sinks = None if ranks is None else _rows(spec.heads, 1, held)
        self.sinks = StoredTensor((heads,), torch.float32, device, sinks) if spec.sinks else None
        kind = "full" if spec.window is None else "chunk" if spec.chunked else "window"
        self.cache_spec = CacheSpec(kind, kv_heads, dim, dtype, spec.window, answer_window=spec.answer_window)
        self.clip = spec.clip
        self.tau = TauFactors(spec, dtype, device) if spec.tau else None
        if spec.qk_norm == "centered":
            self.q_norm, self.k_norm = (HeadNorms(count, dim, stack.eps, dtype, device) for count in (heads, kv_heads))
        elif spec.qk_norm is not None:
            q, k = (heads * dim, kv_heads * dim) if spec.qk_norm == "all" else (dim, dim)
            names = ("query_layernorm", "key_layernorm") if spec.qk_norm == "rotated" else ("q_norm", "k_norm")
            offset, learned = stack.norm_offset, spec.qk_norm != "plain"
            norm = partial(Norm, eps=stack.eps, bias=False, dtype=dtype, device=device, offset=offset, learned=learned)
            self.q_norm = norm(q, stored=names[0])
            if not self.shares_cache:
                self.k_norm = norm(k, stored=names[1])
        self.value_norm = Norm(dim, stack.eps, False, dtype, device, learned=False) if spec.value_norm else None
        if spec.query_latent is not None:
            self.inter_norm = Norm(spec.query_latent, stack.eps, False, dtype, device)
            self.wq = Linear(spec.query_latent, {"wq": heads * dim}, False, dtype, device)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters of `grouped`, and of a gated q_proj, which stores query rows and gate rows of each head in turn."""
        if self.grouped is not None:
            for kind in ("weight", "bias"):
                yield f"{path}.{self.grouped[0]}.{kind}", partial(self._split_groups, path, kind)
        if self.gated:
            yield f"{path}.q_proj.weight", partial(self._split_gate, path, "weight")
            yield f"{path}.q_proj.bias", partial(self._split_gate, path, "bias")

    def _split_groups(self, path: str, kind: str, stored: Tensor) -> Iterable[tuple[str, Tensor]]:
        assert self.grouped is not None
        parts = split_groups(stored, self.grouped[1], self.dim)
        return [(f"{path}.{name}_proj.{kind}", part) for name, part in zip("qkv", parts, strict=True)]

    def _split_gate(self, path: str, kind: str, stored: Tensor) -> Iterable[tuple[str, Tensor]]:
        query, gate = stored.unflatten(0, (-1, 2, self.dim)).unbind(1)  # of the heads of all ranks
        for name, part in (("q_proj", query), ("gate", gate)):
            yield f"{path}.{name}.{kind}", part.flatten(0, 1)

    def forward(self, x: Tensor, cos_sin: CosSin | None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        projected = self._project(x if self.in_scale == 1.0 else x * self.in_scale)
        if self.tau is not None and cos_sin is not None and cos_sin.positions is not None:
            self.tau.scale_(projected, cos_sin.positions)
        projected, head_gates = projected.tensor_split((projected.shape[1] - self.qkv_heads[0] * self.head_gate,), 1)
        projected = projected.unflatten(1, (-1, self.dim))
        if self.keys_as_values:
            projected = torch.cat((projected, projected[:, -self.qkv_heads[2] :]), 1)
        q, k, v = self._prepare(projected[:, : sum(self.qkv_heads)], cos_sin, cache, attn)
        if cos_sin is not None and cos_sin.query_scale is not None:
            q.mul_(cos_sin.query_scale.to(q.dtype)[:, None, None])
        sinks = None if self.sinks is None else self.sinks.weight
        attended = paged_attention(q, k, v, cache, attn, self.scale, self.soft_cap, sinks)
        if self.gated:
            attended *= activation("sigmoid", projected[:, sum(self.qkv_heads) :].flatten(1)).view_as(attended)
        if self.head_gate:
            attended *= activation("sigmoid", head_gates)[..., None]
        attended = attended.flatten(1)
        out = self.out(attended if self.ranks is None else self.ranks.gather(attended))
        return out if self.out_scale == 1.0 else out.mul_(self.out_scale)

    def _project(self, x: Tensor) -> Tensor:
        """Return the projected queries, keys, values and gates, with compressed queries expanded to all heads."""
        projected = self.qkv(x)
        if self.query_latent is None:
            return projected
        latent, others = projected.tensor_split((self.query_latent,), 1)
        return torch.cat((self.wq(self.inter_norm(latent.contiguous())), others), 1)

    def _prepare(
        self, qkv: Tensor, cos_sin: CosSin | None, cache: Tensor, attn: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Norm and rotate `qkv [rows, heads + 2 * kv_heads, dim]` in place; return q, k, v as `paged_attention` takes them."""
        norms, rotation = None, cos_sin[:2] if cos_sin is not None and self.rotates else None
        if self.shares_cache:
            if self.qk_norm is not None:
                self.q_norm.heads_(qkv)
            if rotation is not None:
                rotate_(qkv[..., : 2 * rotation[0].shape[1]], *rotation, self.interleaved)
            return qkv, None, None
        if self.value_norm is not None:
            self.value_norm.heads_(qkv[:, -self.qkv_heads[2] :])
        if self.qk_norm == "rotated" and rotation is not None:
            rotate_(qkv[:, : -self.qkv_heads[2], : 2 * rotation[0].shape[1]], *rotation, self.interleaved)
            rotation = None
        if self.qk_norm in ("all", "centered"):
            for part, norm in zip(qkv.split(self.qkv_heads, 1), (self.q_norm, self.k_norm), strict=False):
                norm.heads_(part.flatten(1)[:, None] if self.qk_norm == "all" else part)  # all: the heads of a row together
        elif self.qk_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset
        if rotation is not None and rotation[0].dim() == 3:
            self._rotate_groups(qkv, *rotation)
            norms = rotation = None
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        return prepare_qkv(qkv, cache, attn, rotation, self.interleaved, norms)

    def _rotate_groups(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Norm queries and keys, and rotate the heads that share a head of keys by its `cos, sin [rows, dim / 2]`."""
        heads, kv_heads, _ = self.qkv_heads
        if self.qk_norm in ("head", "plain"):
            self.q_norm.heads_(qkv[:, :heads])
            self.k_norm.heads_(qkv[:, heads : heads + kv_heads])
        queries, keys = qkv[..., : 2 * cos.shape[2]].split((heads, kv_heads, kv_heads), 1)[:2]
        for head, (of_cos, of_sin) in enumerate(zip(cos[self.held_kv], sin[self.held_kv], strict=True)):
            for part in (queries.chunk(kv_heads, 1)[head], keys[:, head : head + 1]):
                rotate_(part, of_cos, of_sin, self.interleaved)


def split_groups(stored: Tensor, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a matrix or bias that holds, for each key head, its query heads, its key and its value."""
    groups = stored.unflatten(0, (kv_heads, -1, dim))
    return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)


def _ranks_of(spec: AttentionSpec) -> Ranks | None:
    """Return the ranks that divide the heads; None if each has all of them, because a norm or a projection mixes them."""
    ranks = current_ranks()
    if ranks is None or spec.query_latent is not None or spec.qk_norm in ("all", "centered") or spec.tau:
        return None
    kv_heads_fit = ranks.divides(spec.kv_heads) or ranks.size % spec.kv_heads == 0
    return ranks if ranks.divides(spec.heads) and kv_heads_fit else None


def _held_heads(ranks: Ranks, heads: int) -> slice:
    """Return this rank's heads. Where there are fewer heads of keys than ranks, several ranks hold the same one."""
    if heads and not ranks.divides(heads):
        first = ranks.rank * heads // ranks.size
        return slice(first, first + 1)
    return ranks.part(heads)


def _rows(heads: int, dim: int, held: slice, first: int = 0) -> Rows:
    """Return the rows of `held` heads in a tensor of `heads`; `first`: heads that are stored before them."""
    return Rows(heads * dim, (slice((first + held.start) * dim, (first + held.stop) * dim),))


class CrossAttention(TensorModule):
    """Grouped-query attention to encoder rows, whose keys and values are computed once and stay in the cache."""

    def __init__(self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        self.kv_heads, self.dim, self.scale = kv_heads, dim, spec.scale
        self.q = Linear(stack.hidden_size, {"q_proj": heads * dim}, spec.bias, dtype, device)
        self.kv = Linear(stack.hidden_size, dict.fromkeys(("k_proj", "v_proj"), kv_heads * dim), spec.bias, dtype, device)
        self.out = Linear(heads * dim, {"o_proj": stack.hidden_size}, spec.out_bias, dtype, device)
        self.q_norm, self.k_norm = (Norm(dim, stack.eps, False, dtype, device) for _ in range(2))
        self.q_norm.takes_adapters = self.k_norm.takes_adapters = False
        self.cache_spec = CacheSpec("cross", kv_heads, dim, dtype, optional=True)

    def forward(self, x: Tensor, rows: Tensor | None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        q = self.q(x).view(len(x), -1, self.dim)
        self.q_norm.heads_(q)
        k = v = q[:0, : self.kv_heads]
        if rows is not None:
            k, v = self.kv(rows.to(x.dtype)).view(len(rows), 2 * self.kv_heads, self.dim).split(self.kv_heads, 1)
            self.k_norm.heads_(k)
        return self.out(paged_attention(q, k, v, cache, attn, self.scale).flatten(1))


def attention_bytes(width: int, a: AttentionSpec, ops: OpBytes, adapters: AdapterBytes) -> int:
    s, q, outputs = ops.dtype.itemsize, a.heads * a.head_dim, a.projection_size
    kv = 0 if a.source is not None else a.kv_heads * a.head_dim
    qkv = ops.linear_result(outputs, ops.limits.rows) + a.gated * q * s
    peak = max(ops.linear(width, outputs, ops.limits.rows), ops.linear_result(outputs, ops.limits.rows) + adapters.first)
    if a.query_latent is not None:
        latent, rows, joined = a.query_latent, ops.limits.rows, (q + 2 * kv) * s
        first, expanded = ops.linear_result(latent + 2 * kv, rows), ops.linear_result(q, rows)
        normed = first + latent * s + max(ops.norm(latent, True), ops.linear(latent, q, rows))
        peak = max(peak if adapters.first else 0, ops.linear(width, latent + 2 * kv, rows), normed, first + expanded + joined)
        qkv = joined
    if a.tau:
        peak = max(peak, qkv + tau_bytes(a, ops))
    if a.keys_as_values:
        peak, qkv = max(peak, qkv + (q + 2 * kv) * s), (q + 2 * kv) * s
    last = max(ops.linear(q, width, ops.limits.rows), ops.linear_result(width, ops.limits.rows) + adapters.last)
    peak = max(peak, qkv + q * s + last) + (a.in_scale != 1.0) * width * s
    if (not ops.fused("rms_norm") and a.qk_norm) or a.qk_norm == "centered":
        peak = max(peak, qkv + ops.torch_rms_norm(q))
    if not ops.fused("rotary"):
        peak = max(peak, qkv + ops.torch_rotary(q + kv))
    if not ops.fused("attention"):
        peak = max(peak, qkv + 3 * q * s)  # queries and result in the layout of torch's kernels
    return peak


def gathered_bytes(c: DecoderSpec, limits: StepLimits, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values that torch's attention copies out of the cache for a layer, and of its masks.

    Triton splits long sequences instead and holds float32 results of a few tiles of rows per multiprocessor.
    """
    ops = OpBytes(dtype, limits)
    if ops.fused("attention"):
        return 0 if limits.device.type == "cpu" else _SPLIT_KV_BYTES
    s = dtype.itemsize
    if not c.attentions:
        return 0
    widths = [2 * a.kv_heads * a.head_dim if isinstance(a, AttentionSpec) else a.latent + a.shared_dim for a in c.attentions]
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
