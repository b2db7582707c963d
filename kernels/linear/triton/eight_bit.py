"""Quantised linear layers in Triton, and the K loop that all matmul kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gpu import launch_config
from ..eight_bit import FP8_MAX, INT8_MAX, Fp8Weight, Int8Weight

_FEW = 64  # up to this many rows, as in a decode step, are one tile
_SHORTEST = 512  # least depth of a split


@triton.jit
def dot_tiles(x, w, x_inside, w_inside, depth, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Multiply `x [m, depth]` with `w [n, depth]` transposed: `[m, n]`, int32 if both are int8, otherwise float32.

    Args:
        x, w: pointers to the first value of each row, `[m]` and `[n]`. If the dtypes differ, `w` is converted to that of
            `x`, which holds every 8-bit value exactly; uint8 are the bytes of float8_e4m3fn.
        EVEN: `depth` is a multiple of BLOCK_K.
    """
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = x.dtype.element_ty == tl.int8
    eight: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    total = tl.zeros((x.shape[0], w.shape[0]), dtype=tl.int32 if whole else tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            left = tl.load(x[:, None] + (start + k)[None, :], mask=x_inside[:, None], other=0.0)
            right = tl.load(w[None, :] + (start + k)[:, None], mask=w_inside[None, :], other=0.0)
        else:
            rest = start + k < depth
            left = tl.load(x[:, None] + (start + k)[None, :], mask=x_inside[:, None] & rest[None, :], other=0.0)
            right = tl.load(w[None, :] + (start + k)[:, None], mask=w_inside[None, :] & rest[:, None], other=0.0)
        if right.dtype == tl.uint8:
            right = e4m3_to_float16(right)
        if right.dtype != left.dtype:
            right = right.to(left.dtype)
        if eight:  # tensor cores accumulate with few bits: add every block in float32
            total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def tile_of(program, rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the rows `[BLOCK_M]` and columns `[BLOCK_N]` of a program's tile; bands of GROUP tiles share the L2 cache."""
    high_tiles, blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    band = program // (GROUP * blocks)
    high = tl.minimum(high_tiles - band * GROUP, GROUP)
    row = (band * GROUP + program % (GROUP * blocks) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, program % (GROUP * blocks) // high * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def e4m3_to_float16(byte):
    """Convert the bytes of finite float8_e4m3fn values to float16 with integer operations; the exponent bias differs by 8."""
    byte = byte.to(tl.int16)
    return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _dequantized(total, x_scale, w_scale, bias):
    """Apply the scales and the bias, without rounding."""
    return total.to(tl.float32) * x_scale * w_scale + bias


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, width, depth, share,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x `[rows, depth]`, w `[width, depth]`, out `[rows, width]`; grid (tiles of out, splits of depth).

    With PARTIAL, out is `[splits, rows, width]` of unscaled sums, each over `share` of the depth.
    """
    part = tl.program_id(1)
    row, column = tile_of(tl.program_id(0), rows, width, BLOCK_M, BLOCK_N, GROUP)
    inside, there = row < rows, column < width
    from_row, from_column = tl.where(inside, row, 0).to(tl.int64), tl.where(there, column, 0).to(tl.int64)
    first = part * share
    total = dot_tiles(
        x_ptr + from_row * depth + first, w_ptr + from_column * depth + first, inside, there,
        tl.minimum(depth - first, share), BLOCK_K, EVEN,
    )  # fmt: skip
    places = row.to(tl.int64)[:, None] * width + column[None, :]
    kept = inside[:, None] & there[None, :]
    if PARTIAL:
        tl.store(out_ptr + part.to(tl.int64) * rows * width + places, total, mask=kept)
    else:
        x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if SCALED:
            x_scale = tl.load(x_scale_ptr + row, mask=inside, other=0.0)
        if BIASED:
            bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        w_scale = tl.load(w_scale_ptr + column, mask=there, other=0.0)
        made = _dequantized(total, x_scale[:, None], w_scale[None, :], bias[None, :])
        tl.store(out_ptr + places, made.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows", "parts"])
def _sum_kernel(
    parts_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, width, parts, SCALED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts `[parts, rows, width]`, out `[rows, width]`; grid (rows, blocks of width): sum the splits in order and scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    total = tl.zeros((BLOCK,), dtype=parts_ptr.dtype.element_ty)
    for part in range(parts):
        total += tl.load(parts_ptr + (part * rows + row) * width + column, mask=there, other=0)
    x_scale, bias = 1.0, 0.0
    if SCALED:
        x_scale = tl.load(x_scale_ptr + row)
    if BIASED:
        bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    made = _dequantized(total, x_scale, tl.load(w_scale_ptr + column, mask=there, other=0.0), bias)
    tl.store(out_ptr + row * width + column, made.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, dim, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """x, out `[rows, dim]`, scale `[rows]`; grid (rows,): quantise one row, its absmax becomes LARGEST."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    kind: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    scale = tl.div_rn(largest, LARGEST)
    if kind == tl.int8:
        level = x * (tl.div_rn(1.0, largest) * LARGEST)
        level = (level + 12582912.0) - 12582912.0  # at 1.5 * 2^23 floats are 1 apart: round to nearest, ties to even
    else:
        level = tl.div_rn(x, scale)
    tl.store(out_ptr + row * dim + column, level.to(kind), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `int8.quantize_rows` with the same bits."""
    return _quantize(x, torch.int8, INT8_MAX)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fp8.quantize_rows_fp8`, on GPUs with this dtype."""
    return _quantize(x, torch.float8_e4m3fn, FP8_MAX)


def _quantize(x: Tensor, kind: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=kind, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(dim)
        sizes = launch_config.get_config("quantize_rows", str(block))
        _quantize_kernel[(rows,)](x.contiguous(), out, scale, dim, LARGEST=float(largest), BLOCK=block, **sizes)
    return out, scale


def int8_linear(x: Tensor, weights: Int8Weight) -> Tensor:
    """Compute `int8.int8_linear_reference`."""
    rows, scale = quantize_rows(x)
    return scaled_mm(rows, scale, weights.weight, weights.scale, weights.bias, x.dtype)


def fp8_linear(x: Tensor, weights: Fp8Weight) -> Tensor:
    """Compute `fp8.fp8_linear`."""
    if not _multiplies_fp8(launch_config.gpu_info().arch):
        return scaled_mm(x, None, weights.weight.view(torch.uint8), weights.scale, weights.bias, x.dtype)
    rows, scale = quantize_rows_fp8(x)
    return scaled_mm(rows, scale, weights.weight, weights.scale, weights.bias, x.dtype)


def _multiplies_fp8(arch: str) -> bool:
    return arch.startswith("sm_") and int(arch[3:]) >= 89


def scaled_mm(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply `x [rows, in]` with `weight [out, in]` and apply scales per row and per output -> `[rows, out]` in `dtype`.

    Up to 64 rows use split-K if the outputs alone would leave most of the GPU idle.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    if not rows:
        return out
    sizes = launch_config.get_config("linear", _class(rows, x))
    blocks = triton.cdiv(width, sizes["BLOCK_N"])
    share, parts = depth, 1
    if rows <= _FEW:
        share, parts = split_depth(depth, blocks, sizes["BLOCK_K"])
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    to = out if parts == 1 else torch.empty((parts, rows, width), dtype=sums, device=x.device)
    flags = {"SCALED": x_scale is not None, "BIASED": bias is not None}
    _linear_kernel[(triton.cdiv(rows, sizes["BLOCK_M"]) * blocks, parts)](
        x, x_scale, weight, scale, bias, to, rows, width, depth, share, PARTIAL=parts > 1,
        EVEN=depth % sizes["BLOCK_K"] == 0, **flags, **sizes,
    )  # fmt: skip
    if parts > 1:
        last = launch_config.get_config("linear_sum")
        grid = (rows, triton.cdiv(width, last["BLOCK"]))
        _sum_kernel[grid](to, x_scale, scale, bias, out, rows, width, parts, **flags, **last)
    return out


def split_depth(depth: int, blocks: int, block: int) -> tuple[int, int]:
    """Return the depth of a split, a multiple of `block`, and the number of splits, so that `blocks` tiles fill the GPU."""
    share = triton.cdiv(depth, max(1, 2 * launch_config.gpu_info().num_sms // blocks))
    share = triton.cdiv(max(share, _SHORTEST), block) * block
    return share, triton.cdiv(depth, share)


def _class(rows: int, x: Tensor) -> str:
    """Return the shape class in the launch table."""
    if x.dtype == torch.float32:
        return "wide"
    return "few" if rows <= 16 else "some" if rows <= _FEW else f"{8 * x.itemsize}"
