"""Scatter encoder rows into the rows of a batch."""

from __future__ import annotations

from torch import Tensor

from .dispatch import backend


def scatter_rows_(x: Tensor, index: Tensor, rows: Tensor, add: bool = False) -> Tensor:
    """Copy `rows` to `x[index]` in place, or add them. Returns x.

    Args:
        x: `[rows, dim]`, contiguous along `dim`.
        index: int64 `[n]`, unique.
        rows: `[n, dim]` of any dtype, rounded to x's dtype first; may be strided.
    """
    if backend("scatter", x.device, x.dtype) == "triton":
        from .gpu import scatter

        return scatter.scatter_rows_(x, index, rows, add)
    rows = rows.to(x.dtype)
    return x.index_add_(0, index, rows) if add else x.index_copy_(0, index, rows)
