"""The lightning indexer of DeepSeek sparse attention: selects the keys that a latent attention layer attends to.

Its keys have a cache of their own. Published kernels rotate queries and keys by a Hadamard matrix and round them to 8 bits;
products are the same without the rotation, and are computed in float32 here, as in transformers.

Source: the report of DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.selected import ROWS, SCORES, Selection, select_keys
from ...kernels.metadata import AttentionMetadata
from ...kernels.rope import rotate_
from ..interface import CacheSpec, StepLimits
from ..memory_formulas import FLOAT32, OpBytes
from ..text.rope import CosSin
from ..text.spec import LatentSpec
from .basic import Norm, TensorModule
from .linear import Linear

_EPS = 1e-6  # of the norm of the keys, whatever config.json says
_INT64 = 8  # bytes


class Indexer(TensorModule):
    """Selects the keys of each row."""

    def __init__(self, hidden: int, latent: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert latent.indexer is not None
        assert latent.query_latent is not None
        self.spec, self.rope_dim = latent.indexer, latent.shared_dim
        spec = self.spec
        self.wq_b = Linear(latent.query_latent, {"wq_b": spec.heads * spec.dim}, False, dtype, device)
        self.wk = Linear(hidden, {"wk": spec.dim}, False, dtype, device)
        self.k_norm = Norm(spec.dim, _EPS, True, dtype, device)
        self.weights_proj = Linear(hidden, {"weights_proj": spec.heads}, False, torch.float32, device, exact=True)
        self.cache_spec = CacheSpec("latent", 1, spec.dim, dtype)

    def select(self, x: Tensor, query: Tensor, cos_sin: CosSin, cache: Tensor, attn: AttentionMetadata) -> Selection:
        """Select keys for the rows `x [rows, hidden]`. `query`: their normed compressed queries `[rows, query_latent]`."""
        s = self.spec
        q, k = self.wq_b(query).view(len(x), s.heads, s.dim), self.k_norm(self.wk(x))[:, None]
        for part in (q, k):
            rotate_(part[..., : self.rope_dim], *cos_sin[:2], s.interleaved)
        weights = self.weights_proj(x.float()) * (s.heads * s.dim) ** -0.5
        return select_keys(q, weights, k, cache, attn, s.top_k)


def indexer_bytes(hidden: int, a: LatentSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in an Indexer, without its inputs."""
    i, limits = a.indexer, ops.limits
    if i is None or a.query_latent is None:
        return 0
    s, rows, keys = ops.dtype.itemsize, limits.rows, limits.longest
    projected = max(
        ops.linear(a.query_latent, i.heads * i.dim, rows),
        i.heads * i.dim * s + ops.linear(hidden, i.dim, rows) + ops.norm(i.dim, False),
        i.heads * i.dim * s + (0 if ops.fused("rotary") else ops.torch_rotary(i.heads * i.dim)),
    )
    if keys <= i.top_k:
        return projected
    tile = min(rows, max(1, SCORES // (i.heads * keys)))
    scores = keys * i.dim * (s + ops.float32_copy) + tile * (2 * i.heads * keys * FLOAT32 + i.heads * i.dim * ops.float32_copy)
    selected = (i.heads + 1) * i.dim * s + 2 * i.heads * FLOAT32 + i.top_k * _INT64
    return max(projected, selected + -(-scores // rows))


def kept_bytes(a: LatentSpec, limits: StepLimits) -> int:
    """Return the bytes per row of the selected keys, which are kept for later layers."""
    return 0 if a.indexer is None or limits.longest <= a.indexer.top_k else (a.indexer.top_k + 1) * _INT64


def selected_bytes(a: LatentSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in `selected_attention`, without queries and result: what a tile of rows gathers."""
    i, limits = a.indexer, ops.limits
    if i is None or limits.longest <= i.top_k:
        return 0
    s, cached, tile = ops.dtype.itemsize, a.latent + a.shared_dim, min(ROWS, limits.rows)
    gathered = i.top_k * (cached * (s + ops.float32_copy) + _INT64 + 2 * a.heads * FLOAT32)
    gathered += a.heads * cached * (ops.float32_copy + FLOAT32)
    dense = min(limits.rows, i.top_k * -(-limits.keys // limits.longest)) * 2 * a.heads * cached * s
    return -(-max(tile * gathered, dense) // limits.rows)
