"""Attention to selected keys only (sparse attention), in torch on every device.

A row first scores the keys of its sequence with a small query and attends to the best of them. Rows that have no more keys than
are selected attend to all of them by `attention.paged_attention`, without scores.

Source: the report of DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ..metadata import AttentionMetadata
from . import paged_attention, write_cache

SCORES = 1 << 22  # scores of a head and key that are computed at once, at least those of a row
ROWS = 8  # whose keys are gathered at once
_KEY = "selected keys"


@dataclass(frozen=True, eq=False)
class SparseRows:
    """The rows of a request that have more keys than are selected.

    Args:
        request: its index in the batch. rows: its rows in the batch.
        last: int64 `[rows]`, the row's own key.
        keys: int64 `[rows, top_k]`, keys in ascending order; those after the row's own are not attended to.
    """

    request: int
    rows: slice
    last: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """What each row of a step attends to: all keys, or the selected ones.

    Args:
        dense: rows that attend to all keys, int64 `[n]`, and their metadata; None if there are none. Rows None: all.
    """

    dense: tuple[Tensor | None, AttentionMetadata] | None
    sparse: Sequence[SparseRows]


def select_keys(q: Tensor, weights: Tensor, k: Tensor, cache: Tensor, meta: AttentionMetadata, top_k: int) -> Selection:
    """Write this step's keys to the cache and select the keys of each row with the highest scores.

    The score of a key is the sum over heads of `weight * relu(query * key)`.

    Args:
        q: `[rows, heads, dim]`. weights: float32 `[rows, heads]`.
        k: `[rows, 1, dim]` of this step.
        cache: `[1, blocks, block_size, 1, dim]`, written in place.
        top_k: number of keys that are selected.
    """
    write_cache(k, None, cache, meta)
    if meta.block_tables.shape[1] * meta.block_size <= top_k:
        return Selection((None, meta), ())
    sparse = []
    for request, first, stop in _sparse_rows(meta, top_k):
        last = _own_keys(meta, request)[first - meta.query_start_loc[request] :]
        keys = cache.flatten(0, 3)[slots_of(meta, request)].float().T  # [dim, keys]
        step = 1 if meta.batch_invariant else max(1, SCORES // (q.shape[1] * keys.shape[1]))
        best = []
        for tile in range(first, stop, step):
            rows = slice(tile, min(tile + step, stop))
            seen = keys[:, : meta.seq_lens[request] - (stop - rows.stop)]  # by any of these rows
            scores = _scores(q[rows], weights[rows], last[tile - first : rows.stop - first], seen)
            best.append(_best(scores, top_k, meta.batch_invariant))
        sparse.append(SparseRows(request, slice(first, stop), last, torch.cat(best)))
    return Selection(_dense_rows(meta, top_k), sparse)


def selected_attention(
    q: Tensor, row: Tensor, cache: Tensor, meta: AttentionMetadata, selection: Selection, scale: float
) -> Tensor:
    """Write this step's rows to the cache, where each is key and value at once, and attend to the selected ones.

    Args:
        q: `[rows, heads, dim]`.
        row: `[rows, 1, dim]` of this step.
        cache: `[1, blocks, block_size, 1, dim]`, written in place.
        scale: factor of the scores.

    Returns:
        `[rows, heads, dim]`.
    """
    if not selection.sparse:
        return paged_attention(q, row, None, cache, meta, scale)
    write_cache(row, None, cache, meta)
    out = torch.empty_like(q)
    if selection.dense is not None:
        rows, dense = selection.dense
        out[rows] = paged_attention(q[rows].contiguous(), None, None, cache, dense, scale)
    stored = cache.flatten(0, 3)  # [slots, dim]
    for part in selection.sparse:
        slots, step = slots_of(meta, part.request), 1 if meta.batch_invariant else ROWS
        tiles = zip(
            out[part.rows].split(step), q[part.rows].split(step), part.keys.split(step), part.last.split(step), strict=True
        )
        for result, rows, keys, last in tiles:
            result.copy_(_attend(rows, stored[slots[keys]], keys > last[:, None], scale))
    return out


def slots_of(meta: AttentionMetadata, request: int) -> Tensor:
    """Return the slot of each key of a request, int64 `[keys]`."""
    key = torch.arange(meta.seq_lens[request], device=meta.block_tables.device)
    return meta.block_tables[request].long()[key // meta.block_size] * meta.block_size + key % meta.block_size


def _scores(q: Tensor, weights: Tensor, last: Tensor, keys: Tensor) -> Tensor:
    """Return the scores of `keys [dim, keys]`, float32 `[rows, keys]`, -inf after each row's own key."""
    products = F.relu(q.float().flatten(0, 1) @ keys).view(*q.shape[:2], -1)  # [rows, heads, keys]
    scores = (weights[:, None] @ products)[:, 0]
    return scores.masked_fill_(torch.arange(scores.shape[1], device=q.device) > last[:, None], -torch.inf)


def _best(scores: Tensor, top_k: int, batch_invariant: bool) -> Tensor:
    """Return the keys with the highest scores in ascending order, `[rows, top_k]`.

    Which of several keys with the same score are chosen may depend on their number, unless `batch_invariant`.
    """
    if batch_invariant:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    return scores.topk(top_k, -1).indices.sort(-1).values


def _attend(q: Tensor, chosen: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attend with `q [rows, heads, dim]` to `chosen [rows, top_k, dim]`, but not where `hidden [rows, top_k]`."""
    chosen = chosen.float()
    scores = (q.float() @ chosen.transpose(1, 2) * scale).masked_fill_(hidden[:, None], -torch.inf)
    return (scores.softmax(-1) @ chosen).to(q.dtype)


def _own_keys(meta: AttentionMetadata, request: int) -> Tensor:
    """Return the number of the own key of each row of a request, int64 `[n]`."""
    count = meta.query_start_loc[request + 1] - meta.query_start_loc[request]
    length = meta.device_starts_and_lens[1][request].long()
    return length - count + torch.arange(count, device=meta.block_tables.device)


def _num_dense(meta: AttentionMetadata, request: int, top_k: int) -> int:
    """Return how many of the first rows of a request have at most `top_k` keys."""
    count = meta.query_start_loc[request + 1] - meta.query_start_loc[request]
    return min(max(top_k - (meta.seq_lens[request] - count), 0), count)


def _sparse_rows(meta: AttentionMetadata, top_k: int) -> Iterator[tuple[int, int, int]]:
    """Yield the requests with rows that have more than `top_k` keys, the first of these rows, and the end of them."""
    for request, (start, stop) in enumerate(zip(meta.query_start_loc, meta.query_start_loc[1:], strict=False)):
        first = start + _num_dense(meta, request, top_k)
        if first < stop:
            yield request, first, stop


def _dense_rows(meta: AttentionMetadata, top_k: int) -> tuple[Tensor | None, AttentionMetadata] | None:
    """Return the rows with at most `top_k` keys and metadata of a batch of them alone; None if there are none."""
    if _KEY in meta.backend_cache:
        rows: tuple[Tensor | None, AttentionMetadata] | None = meta.backend_cache[_KEY]
        return rows
    counts = {i: n for i in range(len(meta.seq_lens)) if (n := _num_dense(meta, i, top_k))}
    starts, device = meta.query_start_loc, meta.block_tables.device
    result = None
    if counts:
        rows_of = [torch.arange(starts[i], starts[i] + n) for i, n in counts.items()]
        dense = AttentionMetadata(
            query_start_loc=(0, *accumulate(counts.values())),
            seq_lens=tuple(meta.seq_lens[i] - (starts[i + 1] - starts[i]) + n for i, n in counts.items()),
            block_tables=meta.block_tables[torch.tensor(list(counts), device=device)],
            slot_mapping=meta.slot_mapping[:0],
            block_size=meta.block_size,
            batch_invariant=meta.batch_invariant,
        )
        result = torch.cat(rows_of).to(device), dense
    meta.backend_cache[_KEY] = result
    return result
