"""Paged attention row by row in float32, and what the torch backends share."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kv_quant
from ..metadata import AttentionMetadata


def write_cache(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Write `k, v [rows, kv_heads, dim]` into `kv_cache` at their slots."""
    slots = kv_cache.flatten(1, 2)  # [planes, blocks * block_size, kv_heads, dim or bytes per head]
    for plane, rows in zip(slots, (k, v), strict=False):
        assert rows is not None, "a cache of two planes takes keys and values"
        if kv_quant.is_quantized(kv_cache):
            kv_quant.write_quantized(rows, plane, meta.slot_mapping)
        else:
            plane.index_copy_(0, meta.slot_mapping, rows)


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
    """Compute `attention.paged_attention`."""
    if k is not None:
        write_cache(k, v, kv_cache, meta)
    return attend(q, kv_cache, meta, scale, soft_cap, sinks)


def attend(
    q: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend row by row in float32 to keys and values that are in the cache already."""
    slots, group = kv_cache.flatten(1, 2), q.shape[1] // kv_cache.shape[3]
    out = torch.empty_like(q)
    for i, length in enumerate(meta.seq_lens):
        first, last = meta.query_start_loc[i], meta.query_start_loc[i + 1]
        token = torch.arange(length, device=q.device)
        where = meta.block_tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size
        # [planes, length, heads, dim]
        sides = dequantized(slots[:, where], q.shape[2], torch.float32).repeat_interleave(group, 2)
        for row, start, stop in zip(range(first, last), *meta.key_ranges(i).tolist(), strict=True):
            keys, values = sides[0, start:stop], sides[-1, start:stop]
            scores = apply_soft_cap(torch.einsum("hd,khd->hk", q[row].float(), keys) * scale, soft_cap)
            weights = softmax(scores[:, None], None if sinks is None else sinks[:, None, None])[:, 0]
            out[row] = torch.einsum("hk,khd->hd", weights, values).to(q.dtype)
    return out


def dequantized(cached: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the values of a cache, or of part of one, dequantised: `[..., kv_heads, dim]`."""
    return (kv_quant.dequantize(cached, dim) if kv_quant.is_quantized(cached) else cached).to(dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores [..., rows, keys]` with `sinks [..., rows, 1]`, without the sinks' shares."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def apply_soft_cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else (scores / soft_cap).tanh() * soft_cap
