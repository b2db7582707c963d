"""Paged attention: prompt chunks and decode rows of many requests in one call. Knows no model and no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .metadata import AttentionMetadata, DecodeRows
from .native import call, rows


def write_cache(k: Tensor, v: Tensor, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Put `k, v [rows, kv_heads, dim]` into `kv_cache [2, blocks, block_size, kv_heads, dim]` at their slots."""
    slots = kv_cache.flatten(1, 2)  # [2, blocks * block_size, kv_heads, dim]
    slots[0].index_copy_(0, meta.slot_mapping, k)
    slots[1].index_copy_(0, meta.slot_mapping, v)


def paged_attention_reference(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """Row by row over the cache, softmax in float32: what `paged_attention` computes once keys are written."""
    slots, group = kv_cache.flatten(1, 2), q.shape[1] // kv_cache.shape[3]
    out = torch.empty_like(q)
    for i, length in enumerate(meta.seq_lens):
        first, last = meta.query_start[i], meta.query_start[i + 1]
        token = torch.arange(length, device=q.device)
        where = meta.block_tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size
        keys, values = slots[:, where].float().repeat_interleave(group, 2)  # [length, heads, dim]
        for row in range(first, last):
            seen = length - (last - 1 - row) if meta.causal else length
            weights = (torch.einsum("hd,khd->hk", q[row].float(), keys[:seen]) * scale).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values[:seen]).to(q.dtype)
    return out


def paged_attention_native(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """The C++ kernel. The bits of a row depend on its query, its position and the keys it sees, on nothing else."""
    assert kv_cache.is_contiguous(), "the kernel takes the address of a slot from its number"
    q, k, v = (rows(t) for t in (q, k, v))
    n, heads, dim = q.shape
    slots = kv_cache.shape[1] * kv_cache.shape[2]
    out = torch.empty((n, heads, dim), dtype=q.dtype)
    numbers = (meta.block_tables.shape[0], meta.block_tables, meta.block_tables.shape[1], meta.block_size)
    where = (q, q.stride(0), k, k.stride(0), v, v.stride(0), kv_cache, slots, out)
    sizes = (heads, kv_cache.shape[3], dim, scale)
    call("paged_attention", q.dtype, *where, *sizes, *meta.bounds, *numbers, meta.slot_mapping, k.shape[0], int(meta.causal))
    return out


def paged_attention(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """Write this step's keys and values, then attend; each row sees the keys up to its own, or all (`meta.causal`).

    Args:
        q: `[rows, heads, dim]`; heads a multiple of the key/value heads (grouped-query attention).
        k, v: `[rows, kv_heads, dim]` of this step, as many rows as `meta.slot_mapping` has slots.
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, written in place.
        scale: factor of the scores, usually `dim ** -0.5`.

    Returns:
        `[rows, heads, dim]`.
    """
    chosen = backend("attention", q.device, q.dtype)
    if chosen == "native" and q.shape[2] % 2 == 0:
        return paged_attention_native(q, k, v, kv_cache, meta, scale)
    write_cache(k, v, kv_cache, meta)
    if chosen == "reference" or meta.invariant:
        return paged_attention_reference(q, kv_cache, meta, scale)
    out = torch.empty_like(q)
    for group in meta.decodes:
        if group.rows is None:
            return _decode(q, kv_cache, group, scale)
        out.index_copy_(0, group.rows, _decode(q[group.rows], kv_cache, group, scale))
    for request in meta.chunks:
        rows = slice(meta.query_start[request], meta.query_start[request + 1])
        if meta.causal and rows.stop - rows.start == meta.seq_lens[request]:  # its keys are those of this step
            out[rows] = _several(q[rows], k[rows], v[rows], scale, meta.causal)
        else:
            keys, values = _context(kv_cache, meta, request)
            out[rows] = _several(q[rows], keys, values, scale, meta.causal)
    return out


def _decode(q: Tensor, kv_cache: Tensor, plan: DecodeRows, scale: float) -> Tensor:
    """One row a request: the query heads that share a key head stand in for query rows, so keys are not repeated."""
    n, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    keys, values = (side.index_select(0, plan.blocks).view(n, -1, kv_heads, dim).transpose(1, 2) for side in kv_cache)
    done = F.scaled_dot_product_attention(q.view(n, kv_heads, -1, dim), keys, values, plan.mask, scale=scale)
    return done.reshape(n, heads, dim)


def _context(kv_cache: Tensor, meta: AttentionMetadata, request: int) -> tuple[Tensor, Tensor]:
    """All keys and values of one request, `[seq_len, kv_heads, dim]` each."""
    length = meta.seq_lens[request]
    blocks = meta.block_tables[request, : -(-length // meta.block_size)].long()
    keys, values = (side.index_select(0, blocks).flatten(0, 1)[:length] for side in kv_cache)
    return keys, values


def _several(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Causally, `q` are the last rows of the positions that `k` and `v` hold."""
    n, length = q.shape[0], k.shape[0]
    mask = None if n == length or not causal else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, rows, dim]
    alone = causal and mask is None
    done = F.scaled_dot_product_attention(q, k, v, mask, is_causal=alone, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return done[0].transpose(0, 1)
