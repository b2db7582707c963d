"""Linear layers with 4-bit weights in Triton. Codes are unpacked in registers; activations stay in 16 or 32 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu import launch_config
from ..grouped import GroupedWeight
from .eight_bit import _FEW, split_depth, tile_of

_MIN_BLOCK_K = 32


@triton.jit(do_not_specialize=["rows"])
def _int4_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, rows, width, depth, share, code_bytes, groups, stride,
    COLUMNS: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr, BIASED: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x `[rows, depth]`, codes `[width, code_bytes]`, scale, zero `[width, groups]`, out `[rows, width]` in rows of `stride`.

    Grid (tiles of out, splits of depth). With PARTIAL, out is float32 `[splits, rows, width]`, each a sum over `share` inputs.
    COLUMNS: inputs of a group, a multiple of BLOCK_K unless there is one group. Codes minus their zero point are integers that
    every dtype holds exactly; their products are summed, then scaled in float32.
    """
    part = tl.program_id(1)
    row, column = tile_of(tl.program_id(0), rows, width, BLOCK_M, BLOCK_N, GROUP)
    inside, there = row < rows, column < width
    from_row, from_column = tl.where(inside, row, 0).to(tl.int64), tl.where(there, column, 0).to(tl.int64)
    k, byte = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2)
    first = part * share
    last = tl.minimum(first + share, depth)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        mask = inside[:, None] & (start + k < last)[None, :]
        left = tl.load(x_ptr + from_row[:, None] * depth + (start + k)[None, :], mask=mask, other=0.0)
        offset = start // 2 + byte
        stored = (offset < code_bytes)[None, :]
        codes = tl.load(codes_ptr + from_column[:, None] * code_bytes + offset[None, :], mask=stored, other=0)
        right = tl.interleave(codes & 15, codes >> 4).to(tl.float32)
        at = from_column * groups + start // COLUMNS
        if ZEROS:
            right -= tl.load(zero_ptr + at).to(tl.float32)[:, None]
        else:
            right -= OFFSET
        product = tl.dot(left, tl.trans(right.to(left.dtype)), input_precision="ieee")
        total += product * tl.load(scale_ptr + at).to(tl.float32)[None, :]
    kept = inside[:, None] & there[None, :]
    if PARTIAL:
        tl.store(out_ptr + (part.to(tl.int64) * rows + row[:, None]) * width + column[None, :], total, mask=kept)
    else:
        if BIASED:
            total += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
        places = row.to(tl.int64)[:, None] * stride + column[None, :]
        tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=kept)


def supports(weight: object) -> bool:
    """Return whether the kernel multiplies a weight: 4-bit integers with one scale per output and group of adjacent inputs."""
    if not isinstance(weight, GroupedWeight) or not weight.packed or weight.block_rows > 1 or weight.scale.itemsize == 1:
        return False
    others = (weight.table, weight.factor, weight.shift, weight.group_index)
    return all(tensor is None for tensor in others) and (weight.group % _MIN_BLOCK_K == 0 or weight.group >= weight.inputs)


def int4_linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Write `x [rows, in]` times `weight [out, in]` transposed, plus the bias, to `out [rows, out]`, whose rows may be strided.

    Up to 64 rows use split-K if the outputs alone would leave most of the GPU idle.
    """
    (rows, depth), width = x.shape, len(weight.codes)
    if not rows:
        return
    sizes = dict(launch_config.get_config("int4", _class(rows, x)))
    if depth > weight.group:
        sizes["BLOCK_K"] = min(sizes["BLOCK_K"], weight.group & -weight.group)
    blocks = triton.cdiv(width, sizes["BLOCK_N"])
    share, parts = split_depth(depth, blocks, sizes["BLOCK_K"]) if rows <= _FEW else (depth, 1)
    to = out if parts == 1 else torch.empty((parts, rows, width), dtype=torch.float32, device=x.device)
    zero = None if weight.zero is None else weight.zero.contiguous()
    _int4_kernel[(triton.cdiv(rows, sizes["BLOCK_M"]) * blocks, parts)](
        x.contiguous(), weight.codes.contiguous(), weight.scale.contiguous(), zero, bias, to, rows, width, depth, share,
        weight.codes.shape[1], weight.scale.shape[1], out.stride(0), COLUMNS=max(weight.group, sizes["BLOCK_K"]),
        OFFSET=weight.offset, ZEROS=zero is not None, BIASED=bias is not None, PARTIAL=parts > 1, **sizes,
    )  # fmt: skip
    if parts > 1:
        total = to.sum(0) if bias is None else to.sum(0).add_(bias)
        out.copy_(total)


def _class(rows: int, x: Tensor) -> str:
    """Return the shape class in the launch table."""
    if x.dtype == torch.float32:
        return "wide"
    return "few" if rows <= 16 else "some" if rows <= _FEW else ""
