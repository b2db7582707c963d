"""Learned distances in the scores of attention: what queries make of places along a side. Knows no tower."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def toward_places(q: Tensor, table: Tensor, axis: int) -> Tensor:
    """What each query adds to the scores of keys by their place along one axis of its square.

    Args:
        q: `[squares, side, side, heads, dim]`.
        table: `[2 * largest - 1, dim]`, from a key far behind to a key far before; resampled to squares of another side.
        axis: 1, distances between lines, or 2, between columns.

    Returns:
        `[squares, side, side, heads, side]`, the last axis by the key's place.
    """
    side = q.shape[axis]
    fitted = F.interpolate(table.T[None], 2 * side - 1, mode="linear")[0].T
    place = torch.arange(side, device=table.device)
    distances = fitted[place[:, None] - place + side - 1]  # [side, side, dim], query by key
    return torch.einsum("nhwad,hkd->nhwak" if axis == 1 else "nhwad,wkd->nhwak", q, distances)
