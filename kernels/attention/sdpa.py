"""Paged attention by torch: decode rows as one batch, prompts one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kv_quant
from ..metadata import AttentionMetadata, DecodeGroup
from . import reference
from .reference import apply_soft_cap, dequantized, softmax
from .reference import write_cache as write_cache


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
    """Compute `attention.paged_attention`; with `meta.batch_invariant` row by row."""
    if meta.batch_invariant:
        return reference.paged_attention(q, k, v, kv_cache, meta, scale, soft_cap, sinks)
    if k is not None:
        write_cache(k, v, kv_cache, meta)
    out = torch.empty_like(q)
    for group in meta.decode_groups:
        if group.rows is None:
            return _decode(q, kv_cache, group, scale, soft_cap, sinks)
        out.index_copy_(0, group.rows, _decode(q[group.rows], kv_cache, group, scale, soft_cap, sinks))
    for request in meta.prefills:
        rows = slice(meta.query_start_loc[request], meta.query_start_loc[request + 1])
        fresh = meta.causal and not meta.reordered and rows.stop - rows.start == meta.seq_lens[request]  # no cached keys
        if k is not None and fresh and not kv_quant.is_quantized(kv_cache):
            keys, values = k[rows], k[rows] if v is None else v[rows]
        else:
            keys, values = gather_context(q, kv_cache, meta, request, meta.first_block(request))
        if meta.full_attention and soft_cap is None and sinks is None:
            out[rows] = _attend_unmasked(q[rows], keys, values, scale, meta.causal)
        else:
            first, stop = meta.key_ranges(request)
            key = torch.arange(meta.seq_lens[request] - keys.shape[0], meta.seq_lens[request], device=q.device)
            mask = (key >= first[:, None]) & (key < stop[:, None])
            out[rows] = _attend_masked(q[rows], keys, values, mask, scale, soft_cap, sinks)
    return out


def _decode(
    q: Tensor, kv_cache: Tensor, plan: DecodeGroup, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with one row per request. The query heads that share a key head become query rows, so keys are not repeated."""
    n, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    gathered = [dequantized(side.index_select(0, plan.blocks), dim, q.dtype) for side in kv_cache]
    sides = [side.view(n, -1, kv_heads, dim).transpose(1, 2) for side in gathered]
    sinks = None if sinks is None else sinks.view(kv_heads, -1, 1)
    done = _attend(q.view(n, kv_heads, -1, dim), sides[0], sides[-1], plan.mask, scale, soft_cap, sinks)
    return done.reshape(n, heads, dim)


def gather_context(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, request: int, start: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of one request from block `start` on, `[keys, kv_heads, dim]` each, in the dtype of q."""
    length = meta.seq_lens[request]
    blocks = meta.block_tables[request, start : -(-length // meta.block_size)].long()
    gathered = [side.index_select(0, blocks).flatten(0, 1)[: length - start * meta.block_size] for side in kv_cache]
    sides = [dequantized(side, q.shape[2], q.dtype) for side in gathered]
    return sides[0], sides[-1]


def _attend_unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attend without a mask per row. If `causal`, `q` holds the last rows of the positions in `k` and `v`."""
    n, length = q.shape[0], k.shape[0]
    mask = None if n == length or not causal else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, rows, dim]
    is_causal = causal and mask is None
    done = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return done[0].transpose(0, 1)


def _attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with a mask, bool `[rows, keys]`. The query heads that share a key head become query rows."""
    n, kv_heads, dim = q.shape[0], k.shape[1], q.shape[2]
    grouped = q.view(n, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * group, dim]
    mask = mask.repeat_interleave(q.shape[1] // kv_heads, 0)
    sinks = None if sinks is None else sinks.view(kv_heads, -1).repeat(1, n)[..., None]
    done = _attend(grouped, k.transpose(0, 1), v.transpose(0, 1), mask, scale, soft_cap, sinks)
    return done.view(kv_heads, n, -1, dim).transpose(0, 1).reshape(q.shape)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with `q [..., rows, dim]`, `k, v [..., keys, dim]`, sinks `[..., rows, 1]`; the mask is True where rows attend."""
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = apply_soft_cap((q @ k.transpose(-1, -2)).float() * scale, soft_cap)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return softmax(scores, sinks).to(v.dtype) @ v
