"""The step between the QKV projection and attention: QK norm, rotary embedding and, on a GPU, the write to the KV cache."""

from __future__ import annotations

from torch import Tensor

from .dispatch import backend
from .metadata import AttentionMetadata
from .norm import norm_heads_
from .rope import rotate_

QKNorms = tuple[Tensor, Tensor, float, float]
"""Weights `[dim]` of the query and key norm, their eps, and the offset that is added to both weights."""


def prepare_qkv(
    qkv: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool = False,
    qk_norms: QKNorms | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Apply QK norm and rotary embedding in place. On a GPU, one kernel also writes keys and values to the cache.

    Args:
        qkv: `[rows, heads + 2 * kv_heads, dim]`; the heads of a row are contiguous.
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`; a quantised cache has `bytes_per_head` in place of `dim`.
        cos_sin: float32 `[rows, rotary_dim / 2]` each, applied to the first `rotary_dim` values of a head; None: no rotation.
        interleaved: as in `rotate_`.
        qk_norms: RMSNorm of each query and key head; None: no norm.

    Returns:
        q, k, v as `paged_attention` takes them. k and v are None if they have been written to the cache.
    """
    device, dtype, dim = qkv.device, qkv.dtype, qkv.shape[2]
    kv_heads = kv_cache.shape[3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if all(backend(op, device, dtype, dim) == "triton" for op in ("qkv_prepare", "attention")):
        from .gpu import rope

        rope.prepare_qkv_(qkv, kv_cache, meta.slot_mapping, cos_sin, interleaved, qk_norms)
        return q, None, None
    if qk_norms is not None:
        norm_heads_(q, qk_norms[0], *qk_norms[2:])
        norm_heads_(k, qk_norms[1], *qk_norms[2:])
    if cos_sin is not None:
        rotate_(qkv[:, :-kv_heads, : 2 * cos_sin[0].shape[1]], *cos_sin, interleaved)
    return q, k, v
