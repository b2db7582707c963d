"""The step between the QKV projection and attention: QK norm, rotary embedding and, on a GPU, the write to the KV cache."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import backend, implementation
from ..metadata import AttentionMetadata
from . import reference
from .reference import QKNorms


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
    if backend("attention", device, dtype, dim) != "triton":
        return reference.prepare_qkv(qkv, kv_cache, meta, cos_sin, interleaved, qk_norms)
    prepared: tuple[Tensor, Tensor | None, Tensor | None] = implementation("qkv_prepare", device, dtype, dim).prepare_qkv(
        qkv, kv_cache, meta, cos_sin, interleaved, qk_norms
    )
    return prepared
