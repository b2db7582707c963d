"""Scatter rows in torch."""

from __future__ import annotations

from torch import Tensor


def scatter_rows_(x: Tensor, index: Tensor, rows: Tensor, add: bool = False) -> Tensor:
    """Compute `scatter.scatter_rows_`."""
    rows = rows.to(x.dtype)
    return x.index_add_(0, index, rows) if add else x.index_copy_(0, index, rows)
