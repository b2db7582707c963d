"""RMSNorm as a Triton kernel: one program a row. Imported only where Triton is chosen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tune


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    x = tl.load(x_ptr + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)  # rounded before the weight, as the reference does
    tl.store(out_ptr + row * dim + column, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm.rms_norm_reference`, rounded at the same places."""
    rows = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(rows)
    block = triton.next_power_of_2(rows.shape[1])
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, out, rows.shape[1], eps, BLOCK=block, **tune.launch("rms_norm", str(block))
    )
    return out.view(x.shape)
