"""Paged attention for a batch that mixes prompt chunks and decode rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from . import kv_quant
from .dispatch import backend
from .metadata import AttentionMetadata, DecodeGroup
from .native import call, contiguous_heads

_NATIVE_QUANT = {torch.int8: 1, torch.uint8: 2}
_WEIGHTS_ROWS = 64  # rows whose weights are computed at once


def write_cache(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Write `k, v [rows, kv_heads, dim]` into `kv_cache` at their slots."""
    slots = kv_cache.flatten(1, 2)  # [planes, blocks * block_size, kv_heads, dim or bytes per head]
    for plane, rows in zip(slots, (k, v), strict=False):
        assert rows is not None, "a cache of two planes takes keys and values"
        if kv_quant.is_quantized(kv_cache):
            kv_quant.write_quantized(rows, plane, meta.slot_mapping)
        else:
            plane.index_copy_(0, meta.slot_mapping, rows)


def paged_attention_reference(
    q: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` row by row in float32. The keys and values must be in the cache already."""
    slots, group = kv_cache.flatten(1, 2), q.shape[1] // kv_cache.shape[3]
    out = torch.empty_like(q)
    for i, length in enumerate(meta.seq_lens):
        first, last = meta.query_start_loc[i], meta.query_start_loc[i + 1]
        token = torch.arange(length, device=q.device)
        where = meta.block_tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size
        # [planes, length, heads, dim]
        sides = _dequantized(slots[:, where], q.shape[2], torch.float32).repeat_interleave(group, 2)
        for row, start, stop in zip(range(first, last), *meta.key_ranges(i).tolist(), strict=True):
            keys, values = sides[0, start:stop], sides[-1, start:stop]
            scores = _apply_soft_cap(torch.einsum("hd,khd->hk", q[row].float(), keys) * scale, soft_cap)
            weights = _softmax(scores[:, None], None if sinks is None else sinks[:, None, None])[:, 0]
            out[row] = torch.einsum("hk,khd->hd", weights, values).to(q.dtype)
    return out


def paged_attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run the C++ kernel. A row's bits depend only on its query, its position and the keys that it attends to."""
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
    """Write this step's keys and values to the cache, then attend. Each row attends to a range of keys, usually the causal one.

    Args:
        q: `[rows, heads, dim]`; `heads` is a multiple of `kv_heads` (grouped-query attention).
        k, v: `[rows, kv_heads, dim]` of this step, one row per slot of `meta.slot_mapping`. v is None if keys are also the
            values (MLA). Both are None if they are in the cache already (`qkv_prepare.prepare_qkv`, or another layer's).
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, or `[1, ...]` if keys are also the values. A quantised cache
            (`kv_quant`) has `bytes_per_head` in place of `dim`. Written in place. Rows attend to the cached keys: with a
            quantised cache, to quantised keys even in the step that writes them.
        scale: factor of the scores, usually `dim ** -0.5`.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`. None: no cap.
        sinks: float32 `[heads]`: attention sinks, the score of one extra key per head, which takes a share of the softmax.

    Returns:
        `[rows, heads, dim]`.
    """
    chosen = backend("attention", q.device, q.dtype, q.shape[2])
    if chosen == "native" and q.shape[2] % 2 == 0:
        k, v = (k, v) if k is not None else (q[:0], q[:0] if len(kv_cache) == 2 else None)  # without v: keys are the values
        return paged_attention_native(q, k, v, kv_cache, meta, scale, soft_cap, sinks)
    if chosen == "triton":
        from .gpu import attention

        if k is not None:
            attention.write(k, v, kv_cache, meta)
        return attention.attend(q, kv_cache, meta, scale, soft_cap, sinks)
    if k is not None:
        write_cache(k, v, kv_cache, meta)
    if chosen == "reference" or meta.batch_invariant:
        return paged_attention_reference(q, kv_cache, meta, scale, soft_cap, sinks)
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
            keys, values = _gather_context(q, kv_cache, meta, request, meta.first_block(request))
        if meta.full_attention and soft_cap is None and sinks is None:
            out[rows] = _attend_unmasked(q[rows], keys, values, scale, meta.causal)
        else:
            first, stop = meta.key_ranges(request)
            key = torch.arange(meta.seq_lens[request] - keys.shape[0], meta.seq_lens[request], device=q.device)
            mask = (key >= first[:, None]) & (key < stop[:, None])
            out[rows] = _attend_masked(q[rows], keys, values, mask, scale, soft_cap, sinks)
    return out


def attention_weights(
    q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, request: int, heads: Sequence[int], scale: float
) -> Tensor:
    """Return the weights of some heads of a request whose rows attend to all keys: float32 `[heads, rows, keys]` on the CPU.

    The cache holds the keys already. `heads` are query heads.
    """
    keys = _gather_context(q, kv_cache[:1], meta, request, 0)[0][:, [head * kv_cache.shape[3] // q.shape[1] for head in heads]]
    keys = keys.float().permute(1, 2, 0)
    rows = q[meta.query_start_loc[request] : meta.query_start_loc[request + 1], list(heads)].transpose(0, 1).float()
    parts = rows.split(_WEIGHTS_ROWS, 1)  # on a GPU, the weights of a long prompt take much memory
    return torch.cat([((part @ keys) * scale).softmax(-1).cpu() for part in parts], 1)


def _decode(
    q: Tensor, kv_cache: Tensor, plan: DecodeGroup, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with one row per request. The query heads that share a key head become query rows, so keys are not repeated."""
    n, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    found = [_dequantized(side.index_select(0, plan.blocks), dim, q.dtype) for side in kv_cache]
    sides = [side.view(n, -1, kv_heads, dim).transpose(1, 2) for side in found]
    sinks = None if sinks is None else sinks.view(kv_heads, -1, 1)
    done = _attend(q.view(n, kv_heads, -1, dim), sides[0], sides[-1], plan.mask, scale, soft_cap, sinks)
    return done.reshape(n, heads, dim)


def _gather_context(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, request: int, start: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of one request from block `start` on, `[keys, kv_heads, dim]` each, in the dtype of q."""
    length = meta.seq_lens[request]
    blocks = meta.block_tables[request, start : -(-length // meta.block_size)].long()
    found = [side.index_select(0, blocks).flatten(0, 1)[: length - start * meta.block_size] for side in kv_cache]
    sides = [_dequantized(side, q.shape[2], q.dtype) for side in found]
    return sides[0], sides[-1]


def _dequantized(cached: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the values of a cache, or of part of one, dequantised: `[..., kv_heads, dim]`."""
    return (kv_quant.dequantize(cached, dim) if kv_quant.is_quantized(cached) else cached).to(dtype)


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
    scores = _apply_soft_cap((q @ k.transpose(-1, -2)).float() * scale, soft_cap)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return _softmax(scores, sinks).to(v.dtype) @ v


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores [..., rows, keys]` with `sinks [..., rows, 1]`, without the sinks' shares."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def _apply_soft_cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else (scores / soft_cap).tanh() * soft_cap
