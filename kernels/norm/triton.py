"""RMSNorm and LayerNorm in Triton; a program normalises a tile of whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from . import reference


@triton.jit
def _norm_kernel(
    x_ptr,
    add_ptr,  # residual in the layout of x; None: no residual
    weight_ptr,
    bias_ptr,  # None: RMSNorm
    out_ptr,
    rows,
    heads,
    x_row,  # row and head strides
    x_head,
    out_row,
    out_head,
    dim,
    eps,
    offset,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x, out `[rows, heads, dim]`; grid (tiles of rows * heads,). Index r is head `r % heads` of row `r // heads`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < dim)[None, :]
    kind = out_ptr.dtype.element_ty
    at = (row // heads * x_row + row % heads * x_head)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if add_ptr is not None:
        x = (x + tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(x_ptr + at, x, mask=mask)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        x -= (tl.sum(x, 1) / dim)[:, None]
        x = tl.where(mask, x, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)
    normed = x * scale[:, None]
    if bias_ptr is not None:
        normed = normed * weight + tl.load(bias_ptr + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
    elif OFFSET:
        normed = normed * (weight + offset)
    else:
        normed = normed.to(kind).to(tl.float32) * weight  # rounded before the weight, as in the reference
    out = (row // heads * out_row + row % heads * out_head)[:, None] + column[None, :]
    tl.store(out_ptr + out, normed.to(kind), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, offset: float = 0.0) -> Tensor:
    """Compute `norm.rms_norm`, in torch if x or `add` is not contiguous."""
    if not reference.contiguous(x, add):
        return reference.rms_norm(x, weight, eps, add, offset)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.view(-1, 1, x.shape[-1]), add, weight, None, out.view(-1, 1, x.shape[-1]), eps, offset)
    return out


def norm_heads_(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """Compute `norm.norm_heads_`, in torch if the values of a head are not adjacent."""
    if x.stride(2) == 1:
        _launch(x, None, weight, None, x, eps, offset)
    else:
        reference.norm_heads_(x, weight, eps, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """Compute `norm.layer_norm`, in torch if x or `add` is not contiguous."""
    if not reference.contiguous(x, add):
        return reference.layer_norm(x, weight, bias, eps, add)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.view(-1, 1, x.shape[-1]), add, weight, bias, out.view(-1, 1, x.shape[-1]), eps, 0.0)
    return out


def _launch(x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float, offset: float) -> None:
    """Launch for `x, out [rows, heads, dim]`."""
    n, heads, dim = x.shape
    if not x.numel():
        return
    block = triton.next_power_of_2(dim)
    config = launch_config.get_config("norm", str(block))
    strides = (x.stride(0), x.stride(1), out.stride(0), out.stride(1))
    grid = (triton.cdiv(n * heads, config["ROWS"]),)
    _norm_kernel[grid](
        x, add, weight, bias, out, n * heads, heads, *strides, dim, eps, offset, OFFSET=offset != 0.0, BLOCK=block, **config
    )
