"""Bidirectional attention over packed segments, one segment at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute `varlen_attention` one segment at a time, with softmax in float32."""
    parts = []
    for qs, ks, vs in zip(*(t.float().split(list(lengths)) for t in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(parts).to(q.dtype)
