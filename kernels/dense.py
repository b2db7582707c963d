"""Softmax attention over a dense batch, the core of the paged and the packed kernel. Knows neither blocks nor segments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend

_MOST_SCORES = 512 * 512  # rows times keys of a head, beyond which the scores leave the CPU's caches
_FEWEST_ROWS = 48  # of all heads of one item, below which the calls cost more than they save; company must not change it


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """`softmax(q k^T scale) v`, by torch's flash kernel or, in bfloat16 on a CPU, by two batched products.

    The CPU's flash kernel has no short blocks: on a window of 64 x 64 or a prompt of 300 the products, which oneDNN runs in
    bfloat16, take half its time; in float32, beyond about 512 x 512, or for decode rows they do not.
    An item's own shape decides, never its company.

    Args:
        q: `[batch, heads, rows, dim]`; heads a multiple of the key/value heads.
        k, v: `[batch, kv_heads, keys, dim]`.
        mask: bool, broadcastable to `[batch, 1, rows, keys]`, True where a row sees a key; each row sees one at least.
        causal: row i sees keys 0 to i; only without a mask.

    Returns:
        `[batch, heads, rows, dim]`.
    """
    rows, keys = q.shape[2], k.shape[2]
    fits = rows * keys <= _MOST_SCORES and q.shape[1] * rows >= _FEWEST_ROWS
    if fits and backend("dense_attention", q.device, q.dtype) == "products":
        if causal:
            mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril()
        return _products(q, k, v, scale, mask)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """The query heads of one key head stand in for rows, so that keys are not repeated."""
    batch, heads, rows, dim = q.shape
    k, v = (t.flatten(0, 1) for t in (k, v))  # [batch * kv_heads, keys, dim]
    scores = torch.bmm(q.reshape(k.shape[0], -1, dim), k.transpose(1, 2)).mul_(scale)
    if mask is not None:
        scores.view(batch, heads, rows, -1).masked_fill_(~mask, -torch.inf)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)
