"""Products with weights in 8 bits, and the loop that all matrix products share. Knows no layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tune


@triton.jit
def products(x, w, x_inside, w_inside, depth, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Float32 `[m, n]`: sums over `depth` of `x [m, depth]` times `w [n, depth]`.

    Args:
        x, w: pointers to the first number of each row, `[m]` and `[n]`. Two kinds of 8-bit integers are summed as integers;
            else `w` is brought to the dtype of `x`, which holds every 8-bit number exactly.
        EVEN: `depth` is a multiple of BLOCK_K.
    """
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = x.dtype.element_ty == tl.int8
    total = tl.zeros((x.shape[0], w.shape[0]), dtype=tl.int32 if whole else tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            left = tl.load(x[:, None] + (start + k)[None, :], mask=x_inside[:, None], other=0)
            right = tl.load(w[None, :] + (start + k)[:, None], mask=w_inside[None, :], other=0)
        else:
            rest = start + k < depth
            left = tl.load(x[:, None] + (start + k)[None, :], mask=x_inside[:, None] & rest[None, :], other=0)
            right = tl.load(w[None, :] + (start + k)[:, None], mask=w_inside[None, :] & rest[:, None], other=0)
        if right.dtype != left.dtype:
            right = right.to(left.dtype)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
    return total.to(tl.float32)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    x = tl.load(x_ptr + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    level = x * (tl.div_rn(1.0, largest) * 127.0)
    level = (level + 12582912.0) - 12582912.0  # there floats are 1 apart: to nearest, ties to even
    tl.store(out_ptr + row * dim + column, level.to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, tl.div_rn(largest, 127.0))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `int8.quantize_rows`, bit for bit."""
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(dim)
    if rows:
        _quantize_kernel[(rows,)](x.contiguous(), out, scale, dim, BLOCK=block, **tune.launch("quantize_rows", str(block)))
    return out, scale
