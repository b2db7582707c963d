"""Paged attention: prompt chunks and decode rows of many requests in one call. Knows no model and no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import kv8
from .dispatch import backend
from .metadata import AttentionMetadata, DecodeRows
from .native import call, rows

_NATIVE_CODES = {torch.int8: 1, torch.uint8: 2}


def write_cache(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Put `k, v [rows, kv_heads, dim]` into `kv_cache`, as `paged_attention` has it, at their slots."""
    slots = kv_cache.flatten(1, 2)  # [planes, blocks * block_size, kv_heads, dim or width]
    for plane, rows_ in zip(slots, (k, v), strict=False):
        assert rows_ is not None, "a cache of two planes takes keys and values"
        if kv8.is_coded(kv_cache):
            kv8.write(rows_, plane, meta.slot_mapping)
        else:
            plane.index_copy_(0, meta.slot_mapping, rows_)


def paged_attention_reference(
    q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float, soft_cap: float | None = None
) -> Tensor:
    """Row by row over the cache, softmax in float32: what `paged_attention` computes once keys are written."""
    slots, group = kv_cache.flatten(1, 2), q.shape[1] // kv_cache.shape[3]
    out = torch.empty_like(q)
    for i, length in enumerate(meta.seq_lens):
        first, last = meta.query_start[i], meta.query_start[i + 1]
        token = torch.arange(length, device=q.device)
        where = meta.block_tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size
        sides = _numbers(slots[:, where], q.shape[2], torch.float32).repeat_interleave(group, 2)  # [planes, length, heads, dim]
        for row, start, stop in zip(range(first, last), *meta.ranges(i).tolist(), strict=True):
            keys, values = sides[0, start:stop], sides[-1, start:stop]
            scores = _capped(torch.einsum("hd,khd->hk", q[row].float(), keys) * scale, soft_cap)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(q.dtype)
    return out


def paged_attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """The C++ kernel. The bits of a row depend on its query, its position and the keys it sees, on nothing else."""
    assert kv_cache.is_contiguous(), "the kernel takes the address of a slot from its number"
    q, k, v = rows(q), rows(k), None if v is None else rows(v)
    n, heads, dim = q.shape
    slots = kv_cache.shape[1] * kv_cache.shape[2]
    out = torch.empty((n, heads, dim), dtype=q.dtype)
    numbers = (meta.block_tables.shape[0], meta.block_tables, meta.block_tables.shape[1], meta.block_size)
    values = kv_cache if v is not None and not len(v) else v  # an empty tensor has no address, which means: keys are values
    cache = (kv_cache, slots, kv_cache.stride(2), _NATIVE_CODES.get(kv_cache.dtype, 0))
    where = (q, q.stride(0), k, k.stride(0), values, 0 if v is None else v.stride(0), *cache, out)
    sizes = (heads, kv_cache.shape[3], dim, scale, soft_cap or 0.0)
    sees = (int(meta.causal), meta.window or 0, meta.seen, n)
    call("paged_attention", q.dtype, *where, *sizes, *meta.bounds, *numbers, meta.slot_mapping, k.shape[0], *sees)
    return out


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Write this step's keys and values, then attend; each row sees a range of keys, usually those up to its own (`meta`).

    Args:
        q: `[rows, heads, dim]`; heads a multiple of the key/value heads (grouped-query attention).
        k, v: `[rows, kv_heads, dim]` of this step, as many rows as `meta.slot_mapping` has slots; v None where keys are values,
            both None where they are in the cache already (`placing.place`).
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, `[1, ...]` where keys are values; in codes of 8 bits
            `[2, blocks, block_size, kv_heads, width]` (`kv8`). Written in place; rows see what it holds then, not `k` and `v`.
        scale: factor of the scores, usually `dim ** -0.5`.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`; None: they stay.

    Returns:
        `[rows, heads, dim]`.
    """
    chosen = backend("attention", q.device, q.dtype, q.shape[2])
    if chosen == "native" and q.shape[2] % 2 == 0 and k is not None:
        return paged_attention_native(q, k, v, kv_cache, meta, scale, soft_cap)
    if chosen == "triton":
        from .gpu import attention

        if k is not None:
            attention.write(k, v, kv_cache, meta)
        return attention.attend(q, kv_cache, meta, scale, soft_cap)
    if k is not None:
        write_cache(k, v, kv_cache, meta)
    if chosen == "reference" or meta.invariant:
        return paged_attention_reference(q, kv_cache, meta, scale, soft_cap)
    out = torch.empty_like(q)
    for group in meta.decodes:
        if group.rows is None:
            return _decode(q, kv_cache, group, scale, soft_cap)
        out.index_copy_(0, group.rows, _decode(q[group.rows], kv_cache, group, scale, soft_cap))
    for request in meta.chunks:
        rows = slice(meta.query_start[request], meta.query_start[request + 1])
        fresh = meta.causal and rows.stop - rows.start == meta.seq_lens[request]  # its keys are those of this step
        if k is not None and fresh and not kv8.is_coded(kv_cache):
            keys, values = k[rows], k[rows] if v is None else v[rows]
        else:
            keys, values = _context(q, kv_cache, meta, request, meta.first_block(request))
        if meta.plain and soft_cap is None:
            out[rows] = _several(q[rows], keys, values, scale, meta.causal)
        else:
            first, stop = meta.ranges(request)
            key = torch.arange(meta.seq_lens[request] - keys.shape[0], meta.seq_lens[request], device=q.device)
            mask = (key >= first[:, None]) & (key < stop[:, None])
            out[rows] = _masked(q[rows], keys, values, mask, scale, soft_cap)
    return out


def _decode(q: Tensor, kv_cache: Tensor, plan: DecodeRows, scale: float, soft_cap: float | None) -> Tensor:
    """One row a request: the query heads that share a key head stand in for query rows, so keys are not repeated."""
    n, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    found = [_numbers(side.index_select(0, plan.blocks), dim, q.dtype) for side in kv_cache]
    sides = [side.view(n, -1, kv_heads, dim).transpose(1, 2) for side in found]
    done = _attend(q.view(n, kv_heads, -1, dim), sides[0], sides[-1], plan.mask, scale, soft_cap)
    return done.reshape(n, heads, dim)


def _context(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, request: int, start: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one request from block `start` on, `[keys, kv_heads, dim]` each, in the dtype of queries."""
    length = meta.seq_lens[request]
    blocks = meta.block_tables[request, start : -(-length // meta.block_size)].long()
    found = [side.index_select(0, blocks).flatten(0, 1)[: length - start * meta.block_size] for side in kv_cache]
    sides = [_numbers(side, q.shape[2], q.dtype) for side in found]
    return sides[0], sides[-1]


def _numbers(cached: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Of a cache, or a part of one, the numbers `[..., kv_heads, dim]`."""
    return (kv8.decode(cached, dim) if kv8.is_coded(cached) else cached).to(dtype)


def _several(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Causally, `q` are the last rows of the positions that `k` and `v` hold."""
    n, length = q.shape[0], k.shape[0]
    mask = None if n == length or not causal else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, rows, dim]
    alone = causal and mask is None
    done = F.scaled_dot_product_attention(q, k, v, mask, is_causal=alone, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return done[0].transpose(0, 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """`mask` bool `[rows, keys]`; the query heads that share a key head stand in for more query rows."""
    n, kv_heads, dim = q.shape[0], k.shape[1], q.shape[2]
    grouped = q.view(n, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * group, dim]
    mask = mask.repeat_interleave(q.shape[1] // kv_heads, 0)
    done = _attend(grouped, k.transpose(0, 1), v.transpose(0, 1), mask, scale, soft_cap)
    return done.view(kv_heads, n, -1, dim).transpose(0, 1).reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None) -> Tensor:
    """`q [..., rows, dim]`, `k, v [..., keys, dim]`; a bool mask that is true where a row sees a key."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = _capped((q @ k.transpose(-1, -2)).float() * scale, soft_cap)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else (scores / soft_cap).tanh() * soft_cap
