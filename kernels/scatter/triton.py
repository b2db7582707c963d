"""Scatter of encoder rows in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config


@triton.jit
def _scatter_kernel(x_ptr, index_ptr, rows_ptr, dim, x_row, rows_row, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < dim
    x_ptr += tl.load(index_ptr + row) * x_row + column
    kind = x_ptr.dtype.element_ty
    value = tl.load(rows_ptr + row * rows_row + column, mask=inside, other=0.0).to(kind)
    if ADD:  # indices are unique, so no atomics are needed
        value = (value.to(tl.float32) + tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)).to(kind)
    tl.store(x_ptr, value, mask=inside)


def scatter_rows_(x: Tensor, index: Tensor, rows: Tensor, add: bool) -> Tensor:
    """Compute `scatter.scatter_rows_`."""
    n, dim = rows.shape
    shape = launch_config.get_config("scatter")
    if n:
        grid = (n, triton.cdiv(dim, shape["BLOCK"]))
        _scatter_kernel[grid](x, index, rows, dim, x.stride(0), rows.stride(0), ADD=add, **shape)
    return x
