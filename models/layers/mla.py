"""Multi-head latent attention (MLA): the cache holds one compressed row per token, shared by all heads.

Keys and values are not expanded from the cached rows: the key projection is absorbed into the queries and the value projection
is applied to the result of attention, so that the cached rows themselves serve as keys and values.

Source: arXiv 2405.04434.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.attention import paged_attention
from ...kernels.attention.selected import selected_attention
from ...kernels.linear import LinearWeight, linear, pack
from ...kernels.metadata import AttentionMetadata
from ...kernels.rope import rotate_
from ..interface import CacheSpec
from ..memory_formulas import OpBytes, packed_weight_bytes
from ..text.rope import CosSin
from ..text.spec import LatentSpec
from .basic import Norm, TensorModule, WeightedLayer
from .indexer import Indexer, indexer_bytes, selected_bytes
from .linear import Linear

SELECTION = "selection"
"""Key in `AttentionMetadata.backend_cache` of the keys that the last indexer selected in this step."""


class LatentUpProjection(WeightedLayer):
    """`kv_b_proj`: two matrices per head that expand a latent row to a key `[nope, latent]` and a value `[value, latent]`."""

    def __init__(self, spec: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = (spec.heads, spec.nope_dim + spec.value_dim, spec.latent)
        self.split = (spec.nope_dim, spec.value_dim)
        self.weight = torch.empty(self.sizes[0] * self.sizes[1], spec.latent, dtype=dtype, device=device)
        self.keys: list[LinearWeight] = []
        self.values: list[LinearWeight] = []

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path[: path.rfind('.') + 1]}kv_b_proj.weight", self.weight

    def pack(self) -> None:
        for head in self.weight.view(self.sizes):
            key, value = head.split(self.split)
            self.keys.append(pack(key.T.contiguous(), None))
            self.values.append(pack(value.clone(), None))  # a view would keep the whole weight
        del self.weight

    def packed_bytes(self, device: torch.device) -> int:
        (heads, _, latent), (nope, value) = self.sizes, self.split
        shapes = ((nope, latent), (latent, value))
        return heads * sum(packed_weight_bytes(*shape, False, self.weight.dtype, device) for shape in shapes)

    def absorb(self, q: Tensor) -> Tensor:
        """Carry queries `[rows, heads, nope]` into the space of the cached rows: `[rows, heads, latent]`."""
        return _by_head(q, self.keys)

    def forward(self, attended: Tensor) -> Tensor:
        """Expand attended latent rows `[rows, heads, latent]` to values `[rows, heads, value]`."""
        return _by_head(attended, self.values)


def _by_head(x: Tensor, weights: list[LinearWeight]) -> Tensor:
    return torch.stack([linear(head, weight) for head, weight in zip(x.unbind(1), weights, strict=True)], 1)


class LatentAttention(TensorModule):
    def __init__(self, hidden: int, spec: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, cached = spec, spec.latent + spec.shared_dim
        width = spec.query_latent
        shards = {"q_a_proj": width} if width is not None else {}
        self.down = Linear(hidden, {**shards, "kv_a_proj_with_mqa": cached}, spec.bias, dtype, device)
        name, queries = "q_proj" if width is None else "q_b_proj", spec.heads * (spec.nope_dim + spec.shared_dim)
        self.query = Linear(width or hidden, {name: queries}, False, dtype, device)
        self.q_a_layernorm = None if width is None else Norm(width, spec.eps, False, dtype, device)
        self.kv_a_layernorm = Norm(spec.latent, spec.eps, False, dtype, device)
        self.kv_up = LatentUpProjection(spec, dtype, device)
        self.out = Linear(spec.heads * spec.value_dim, {"o_proj": hidden}, spec.bias, dtype, device)
        self.cache_spec = CacheSpec("latent", 1, cached, dtype)
        has_indexer = spec.indexer is not None and not spec.indexer.shared
        self.indexer = Indexer(hidden, spec, dtype, device) if has_indexer else None
        self.further_caches = () if self.indexer is None else (self.indexer.cache_spec,)

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        *index: tuple[Tensor, AttentionMetadata],
    ) -> Tensor:
        """Attend. `index`: cache and metadata of the indexer's keys, if the layer has an indexer."""
        c, down = self.spec, self.down(x)
        query_in = x if self.q_a_layernorm is None else self.q_a_layernorm(down[:, : c.query_latent].contiguous())
        q = self.query(query_in).view(len(x), c.heads, -1)  # [rows, heads, nope_dim + shared_dim]
        latent, rope = down[:, c.query_latent or 0 :].split((c.latent, c.shared_dim), 1)
        row = torch.cat((self.kv_a_layernorm(latent.contiguous()), rope), 1)[:, None]  # the cached row of a token
        if c.rope is not None and cos_sin is not None:
            rotate_(q[..., c.nope_dim :], *cos_sin[:2], c.rope.interleaved)
            rotate_(row[..., c.latent :], *cos_sin[:2], c.rope.interleaved)
        if cos_sin is not None and cos_sin.query_scale is not None:
            q.mul_(cos_sin.query_scale.to(q.dtype)[:, None, None])
        q = torch.cat((self.kv_up.absorb(q[..., : c.nope_dim]), q[..., c.nope_dim :]), -1)
        for index_cache, index_attn in index:
            assert self.indexer is not None
            assert cos_sin is not None
            attn.backend_cache[SELECTION] = self.indexer.select(x, query_in, cos_sin, index_cache, index_attn)
        if c.indexer is None:
            attended = paged_attention(q, row, None, cache, attn, c.scale)
        else:
            attended = selected_attention(q, row, cache, attn, attn.backend_cache[SELECTION], c.scale)
        return self.out(self.kv_up(attended[..., : c.latent]).flatten(1))


def latent_attention_bytes(hidden: int, a: LatentSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in LatentAttention, without its input `[rows, hidden]`."""
    s, rows, cached, latent = ops.dtype.itemsize, ops.limits.rows, a.latent + a.shared_dim, a.query_latent or 0
    q, absorbed = a.heads * (a.nope_dim + a.shared_dim) * s, a.heads * cached * s
    down, query = ops.linear_result(latent + cached, rows), latent * s  # the down projection, and the queries' normed part
    base = down + query + cached * s  # with the cached row
    attended = base + absorbed * (2 if ops.fused("attention") else 3)  # queries and results; torch's kernel may copy them
    index = absorbed + indexer_bytes(hidden, a, ops)
    value, values = ops.linear_result(a.value_dim, rows), a.heads * a.value_dim * s
    return max(
        ops.linear(hidden, latent + cached, rows),
        down + query + ops.norm(latent, True),
        down + query + ops.linear(latent or hidden, a.heads * (a.nope_dim + a.shared_dim), rows),
        down + query + q + a.latent * s + max(ops.norm(a.latent, True), cached * s),
        base + q + (0 if ops.fused("rotary") else ops.torch_rotary(a.heads * a.shared_dim)),
        # queries of each head carried to the cached rows' space; then stacked; then joined with their rotated part
        base + q + a.heads * (ops.linear_result(a.latent, rows) + a.latent * s) + ops.linear_result(a.nope_dim, rows),
        base + q + a.heads * a.latent * s + absorbed,
        attended + selected_bytes(a, ops),
        base + index,
        base + 2 * absorbed + a.heads * value + max(values, ops.linear_result(a.latent, rows)),  # values by head, then stacked
        base + 2 * absorbed + values + ops.linear(a.heads * a.value_dim, hidden, rows),
    )
