"""Bidirectional attention over packed segments: every row attends to its own segment (`varlen` as in FlashAttention)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import implementation


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend within segments of `lengths`: `q, k, v [tokens, heads, dim]` -> `[tokens, heads, dim]`.

    Adjacent segments of equal length may run as one batch, so callers should keep equal windows next to each other.
    """
    attended: Tensor = implementation("varlen_attention", q.device, q.dtype, q.shape[2]).varlen_attention(
        q, k, v, lengths, scale
    )
    return attended


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
        whole, segment, rest = slice(start, end), slice(end - length, end), slice(end, end + more)
        out[whole] = varlen_attention(q[whole], k[whole], v[whole], segments, scale)
        if more:
            query, key, value = (part.transpose(0, 1)[None] for part in (q[rest], k[segment], v[segment]))
            out[rest] = F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
        start, segments = rest.stop, []
    return out
