"""Decomposed relative positions: products of queries with a learned vector per distance, added to attention scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def relative_position_scores(q: Tensor, table: Tensor, axis: int) -> Tensor:
    """Return what each query adds to the scores of the keys at each position along one axis of its square.

    Args:
        q: `[squares, side, side, heads, dim]`.
        table: `[2 * max_side - 1, dim]`; row i is for a query i - (max_side - 1) positions after its key. Resampled for squares
            of another side.
        axis: 1 for distances between rows of the square, 2 for those between columns.

    Returns:
        `[squares, side, side, heads, side]`, the last axis by the key's position.
    """
    side = q.shape[axis]
    fitted = F.interpolate(table.T[None], 2 * side - 1, mode="linear")[0].T
    position = torch.arange(side, device=table.device)
    distances = fitted[position[:, None] - position + side - 1]  # [side, side, dim], query by key
    return torch.einsum("nhwad,hkd->nhwak" if axis == 1 else "nhwad,wkd->nhwak", q, distances)


def distance_scores(content: Tensor, distances: Tensor, index: Tensor) -> Tensor:
    """Return the products of `content [heads, n, dim]` with vectors of distances, `[heads, n, n]`.

    Args:
        distances: `[heads, distances, dim]`.
        index: int64 `[n, n]`, the row of `distances` of each result.
    """
    return (content @ distances.transpose(1, 2)).gather(2, index.expand(len(content), -1, -1))
