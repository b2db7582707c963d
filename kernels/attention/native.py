"""Paged attention in C++, which writes the cache and attends in one call; odd head dimensions are computed in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata import AttentionMetadata
from ..native import call, contiguous_heads
from . import sdpa
from .reference import write_cache as write_cache

_NATIVE_QUANT = {torch.int8: 1, torch.uint8: 2}


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention.paged_attention`. A row's bits depend only on its query, position and keys."""
    if q.shape[2] % 2:
        return sdpa.paged_attention(q, k, v, kv_cache, meta, scale, soft_cap, sinks)
    if k is None:
        k, v = q[:0], q[:0] if len(kv_cache) == 2 else None  # without v: keys are the values
    assert kv_cache.is_contiguous(), "the kernel takes the address of a slot from its number"
    q, k, v = contiguous_heads(q), contiguous_heads(k), None if v is None else contiguous_heads(v)
    n, heads, dim = q.shape
    slots = kv_cache.shape[1] * kv_cache.shape[2]
    out = torch.empty((n, heads, dim), dtype=q.dtype)
    numbers = (meta.block_tables.shape[0], meta.block_tables, meta.block_tables.shape[1], meta.block_size)
    values = kv_cache if v is not None and not len(v) else v  # an empty tensor has a null address, which means "v is k"
    cache = (kv_cache, slots, kv_cache.stride(2), _NATIVE_QUANT.get(kv_cache.dtype, 0))
    where = (q, q.stride(0), k, k.stride(0), values, 0 if v is None else v.stride(0), *cache, out)
    sizes = (heads, kv_cache.shape[3], dim, scale, soft_cap or 0.0)
    reads = (int(meta.causal), meta.window or 0, meta.key_range, n)
    rows = (meta.slot_mapping, k.shape[0], *reads, sinks)
    call("paged_attention", q.dtype, *where, *sizes, *meta.cpu_starts_and_lens, *numbers, *rows)
    return out
