"""Paged attention: prompt chunks and decode rows of many requests in one call. Knows no model and no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import dense_attention
from .dispatch import backend
from .metadata import AttentionMetadata, DecodeRows


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
            seen = length - (last - 1 - row)
            weights = (torch.einsum("hd,khd->hk", q[row].float(), keys[:seen]) * scale).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values[:seen]).to(q.dtype)
    return out


def paged_attention(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """Write this step's keys and values, then attend causally.

    Args:
        q: `[rows, heads, dim]`; heads a multiple of the key/value heads (grouped-query attention).
        k, v: `[rows, kv_heads, dim]` of this step.
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, written in place.
        scale: factor of the scores, usually `dim ** -0.5`.

    Returns:
        `[rows, heads, dim]`.
    """
    write_cache(k, v, kv_cache, meta)
    if backend("attention", q.device, q.dtype) == "reference":
        return paged_attention_reference(q, kv_cache, meta, scale)
    out = torch.empty_like(q)
    for group in meta.decodes:
        if group.rows is None:
            return _decode(q, kv_cache, group, scale)
        out.index_copy_(0, group.rows, _decode(q[group.rows], kv_cache, group, scale))
    for request in meta.chunks:
        rows = slice(meta.query_start[request], meta.query_start[request + 1])
        if rows.stop - rows.start == meta.seq_lens[request]:  # nothing before this chunk: no need to read the cache
            out[rows] = _causal(q[rows], k[rows], v[rows], scale)
        else:
            keys, values = _context(kv_cache, meta, request)
            out[rows] = _causal(q[rows], keys, values, scale)
    return out


def _decode(q: Tensor, kv_cache: Tensor, plan: DecodeRows, scale: float) -> Tensor:
    """One row a request: the query heads that share a key head stand in for query rows, so keys are not repeated."""
    n, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    keys, values = (side.index_select(0, plan.blocks).view(n, -1, kv_heads, dim).transpose(1, 2) for side in kv_cache)
    done = dense_attention(q.view(n, kv_heads, -1, dim), keys, values, scale, plan.mask)
    return done.reshape(n, heads, dim)


def _context(kv_cache: Tensor, meta: AttentionMetadata, request: int) -> tuple[Tensor, Tensor]:
    """All keys and values of one request, `[seq_len, kv_heads, dim]` each."""
    length = meta.seq_lens[request]
    blocks = meta.block_tables[request, : -(-length // meta.block_size)].long()
    keys, values = (side.index_select(0, blocks).flatten(0, 1)[:length] for side in kv_cache)
    return keys, values


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`q` are the last rows of the positions that `k` and `v` hold."""
    n, length = q.shape[0], k.shape[0]
    mask = None if n == length else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, rows, dim]
    return dense_attention(q, k, v, scale, mask, causal=mask is None)[0].transpose(0, 1)
