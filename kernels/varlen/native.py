"""Bidirectional attention over packed segments in C++; odd head dimensions are computed in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..native import call, contiguous_heads
from . import sdpa


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute `varlen.varlen_attention`. A row's bits depend only on its own segment."""
    if q.shape[2] % 2:
        return sdpa.varlen_attention(q, k, v, lengths, scale)
    q, k, v = (contiguous_heads(t) for t in (q, k, v))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    out = torch.empty(q.shape, dtype=q.dtype)
    where = (q, q.stride(0), k, k.stride(0), v, v.stride(0), out)
    call("varlen_attention", q.dtype, *where, q.shape[1], k.shape[1], q.shape[2], scale, starts, sizes, len(lengths))
    return out
