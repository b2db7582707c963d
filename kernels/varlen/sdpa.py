"""Bidirectional attention over packed segments by torch: adjacent segments of equal length run as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute `varlen.varlen_attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, count, length in _equal_length_runs(lengths):
        rows = slice(start, start + count * length)
        # [count, heads, length, dim] each
        qs, ks, vs = (t[rows].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
        out[rows] = F.scaled_dot_product_attention(qs, ks, vs, scale=scale).transpose(1, 2).flatten(0, 1)
    return out


def _equal_length_runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield `(first row, segments, rows each)` of every run of equal lengths: [4, 4, 2] gives (0, 2, 4), (8, 1, 2)."""
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        if length:
            yield start, count, length
        start += count * length
