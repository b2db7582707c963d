"""Bidirectional attention over packed segments: every row attends to its own segment (`varlen` as in FlashAttention)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .native import call, contiguous_heads


def varlen_attention_reference(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute `varlen_attention` one segment at a time, with softmax in float32."""
    parts = []
    for qs, ks, vs in zip(*(t.float().split(list(lengths)) for t in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(parts).to(q.dtype)


def varlen_attention_native(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Run the C++ kernel. A row's bits depend only on its own segment."""
    q, k, v = (contiguous_heads(t) for t in (q, k, v))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    out = torch.empty(q.shape, dtype=q.dtype)
    where = (q, q.stride(0), k, k.stride(0), v, v.stride(0), out)
    call("varlen_attention", q.dtype, *where, q.shape[1], k.shape[1], q.shape[2], scale, starts, sizes, len(lengths))
    return out


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend within segments of `lengths`: `q, k, v [tokens, heads, dim]` -> `[tokens, heads, dim]`.

    Adjacent segments of equal length run as one batch, so callers should keep equal windows next to each other.
    """
    chosen = backend("varlen_attention", q.device, q.dtype, q.shape[2])
    if chosen == "triton":
        from .gpu import varlen

        return varlen.varlen_attention(q, k, v, lengths, scale)
    if chosen == "native" and q.shape[2] % 2 == 0:
        return varlen_attention_native(q, k, v, lengths, scale)
    if chosen == "reference":
        return varlen_attention_reference(q, k, v, lengths, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, count, length in _equal_length_runs(lengths):
        rows = slice(start, start + count * length)
        # [count, heads, length, dim] each
        qs, ks, vs = (t[rows].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
        out[rows] = F.scaled_dot_product_attention(qs, ks, vs, scale=scale).transpose(1, 2).flatten(0, 1)
    return out


def varlen_attention_with_trailing(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, trailing: Sequence[int | None]
) -> Tensor:
    """Run `varlen_attention`. The `trailing` rows after each segment attend to the segment's rows; none attends to them."""
    out, start, segments = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0, list[int]()
    counts = [n or 0 for n in trailing]
    for number, (length, more) in enumerate(zip(lengths, counts, strict=True)):
        segments.append(length)
        if not more and number + 1 < len(counts):
            continue
        end = start + sum(segments)
        whole, own, rest = slice(start, end), slice(end - length, end), slice(end, end + more)
        out[whole] = varlen_attention(q[whole], k[whole], v[whole], segments, scale)
        if more:
            query, key, value = (part.transpose(0, 1)[None] for part in (q[rest], k[own], v[own]))
            out[rest] = F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
        start, segments = rest.stop, []
    return out


def _equal_length_runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield `(first row, segments, rows each)` of every run of equal lengths: [4, 4, 2] gives (0, 2, 4), (8, 1, 2)."""
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        if length:
            yield start, count, length
        start += count * length
