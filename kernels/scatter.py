"""Encoder rows into the rows of a batch, in place of what is there or on top of it. Knows no model and no layer."""

from __future__ import annotations

from torch import Tensor

from .dispatch import backend


def put_rows_(x: Tensor, index: Tensor, rows: Tensor, add: bool = False) -> Tensor:
    """`rows` into `x` in place, or added to what is there; returns x.

    Args:
        x: `[rows, dim]`, whose numbers lie side by side.
        index: int64 `[n]`, each row of x at most once.
        rows: `[n, dim]` of any dtype, rounded to x's first; may be a part of longer rows.
    """
    if backend("scatter", x.device, x.dtype) == "triton":
        from .gpu import scatter

        return scatter.put_rows_(x, index, rows, add)
    rows = rows.to(x.dtype)
    return x.index_add_(0, index, rows) if add else x.index_copy_(0, index, rows)
