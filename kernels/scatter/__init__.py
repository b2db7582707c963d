"""Scatter encoder rows into the rows of a batch."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import implementation


def scatter_rows_(x: Tensor, index: Tensor, rows: Tensor, add: bool = False) -> Tensor:
    """Copy `rows` to `x[index]` in place, or add them. Returns x.

    Args:
        x: `[rows, dim]`, contiguous along `dim`.
        index: int64 `[n]`, unique.
        rows: `[n, dim]` of any dtype, rounded to x's dtype first; may be strided.
    """
    written: Tensor = implementation("scatter", x.device, x.dtype).scatter_rows_(x, index, rows, add)
    return written
