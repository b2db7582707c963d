"""QK norm and rotary embedding, each with its own op. The cache is not written: attention does it."""

from __future__ import annotations

from torch import Tensor

from ..metadata import AttentionMetadata
from ..norm import norm_heads_
from ..rope import rotate_

QKNorms = tuple[Tensor, Tensor, float, float]
"""Weights `[dim]` of the query and key norm, their eps, and the offset that is added to both weights."""


def prepare_qkv(
    qkv: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    qk_norms: QKNorms | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute `qkv_prepare.prepare_qkv`."""
    kv_heads = kv_cache.shape[3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if qk_norms is not None:
        norm_heads_(q, qk_norms[0], *qk_norms[2:])
        norm_heads_(k, qk_norms[1], *qk_norms[2:])
    if cos_sin is not None:
        rotate_(qkv[:, :-kv_heads, : 2 * cos_sin[0].shape[1]], *cos_sin, interleaved)
    return q, k, v
