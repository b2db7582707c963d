"""Products with weights in 8 bits, and the loop that all matrix products share. Knows no layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import LARGEST, Fp8
from ..int8 import LEVELS, Int8
from . import tune

_FEW = 64  # rows of a decode step that one tile holds
_SHORTEST = 512  # what is summed in one share at least


@triton.jit
def products(x, w, x_inside, w_inside, depth, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Sums over `depth` of `x [m, depth]` times `w [n, depth]`: `[m, n]`, int32 of two kinds of int8, else float32.

    Args:
        x, w: pointers to the first number of each row, `[m]` and `[n]`. Where the dtypes differ `w` is brought to that of
            `x`, which holds every 8-bit number exactly; uint8 are the bytes of float8_e4m3fn.
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
            right = from_e4m3(right)
        if right.dtype != left.dtype:
            right = right.to(left.dtype)
        if eight:  # tensor cores keep few bits of a sum: after each block it is added in float32
            total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def from_e4m3(byte):
    """float16 of the bytes of float8_e4m3fn that are numbers, on cards without this dtype too: the exponent is 8 less there."""
    byte = byte.to(tl.int16)
    return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _dequantized(total, x_scale, w_scale, bias):
    """Sums of 8-bit numbers as what they stand for, rounded nowhere."""
    return total.to(tl.float32) * x_scale * w_scale + bias


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, width, depth, share,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of outputs; with PARTIAL sums over one `share` of what is summed, `[parts, rows, width]`."""
    program, part = tl.program_id(0), tl.program_id(1)
    high_tiles, blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(width, BLOCK_N)
    band = program // (GROUP * blocks)  # some tiles against all blocks, then the next, so that both stay in the cache
    high = tl.minimum(high_tiles - band * GROUP, GROUP)
    row = (band * GROUP + program % (GROUP * blocks) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = program % (GROUP * blocks) // high * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, there = row < rows, column < width
    from_row, from_column = tl.where(inside, row, 0).to(tl.int64), tl.where(there, column, 0).to(tl.int64)
    first = part * share
    total = products(
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
    """The shares of a row's sums, one after the other."""
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
    """A row in 8 bits, its largest magnitude as LARGEST."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    kind: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
    scale = tl.div_rn(largest, LARGEST)
    if kind == tl.int8:
        level = x * (tl.div_rn(1.0, largest) * LARGEST)
        level = (level + 12582912.0) - 12582912.0  # there floats are 1 apart: to nearest, ties to even
    else:
        level = tl.div_rn(x, scale)
    tl.store(out_ptr + row * dim + column, level.to(kind), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `int8.quantize_rows`, bit for bit."""
    return _quantize(x, torch.int8, LEVELS)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.round_rows`, on cards that have such numbers."""
    return _quantize(x, torch.float8_e4m3fn, LARGEST)


def _quantize(x: Tensor, kind: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    rows, dim = x.shape
    out = torch.empty((rows, dim), dtype=kind, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(dim)
        sizes = tune.launch("quantize_rows", str(block))
        _quantize_kernel[(rows,)](x.contiguous(), out, scale, dim, LARGEST=float(largest), BLOCK=block, **sizes)
    return out, scale


def int8_linear(x: Tensor, weights: Int8) -> Tensor:
    """As `int8.int8_linear_reference`."""
    rows, scale = quantize_rows(x)
    return multiply(rows, scale, weights.weight, weights.scale, weights.bias, x.dtype)


def fp8_linear(x: Tensor, weights: Fp8) -> Tensor:
    """As `fp8.fp8_linear`."""
    if not _multiplies_fp8(tune.card().arch):
        return multiply(x, None, weights.weight.view(torch.uint8), weights.scale, weights.bias, x.dtype)
    rows, scale = round_rows(x)
    return multiply(rows, scale, weights.weight, weights.scale, weights.bias, x.dtype)


def _multiplies_fp8(arch: str) -> bool:
    return arch.startswith("sm_") and int(arch[3:]) >= 89


def multiply(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x [rows, in]`, times a scale of each row, and `weight [out, in]`, times one of each output -> `[rows, out]` in `dtype`.

    Up to 64 rows are summed in shares where the outputs alone would leave most of the card idle.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    if not rows:
        return out
    sizes = tune.launch("linear", _class(rows, x))
    blocks = triton.cdiv(width, sizes["BLOCK_N"])
    share, parts = depth, 1
    if rows <= _FEW:
        share = triton.cdiv(depth, max(1, 2 * tune.card().processors // blocks))
        share = triton.cdiv(max(share, _SHORTEST), sizes["BLOCK_K"]) * sizes["BLOCK_K"]
        parts = triton.cdiv(depth, share)
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    to = out if parts == 1 else torch.empty((parts, rows, width), dtype=sums, device=x.device)
    given = {"SCALED": x_scale is not None, "BIASED": bias is not None}
    _linear_kernel[(triton.cdiv(rows, sizes["BLOCK_M"]) * blocks, parts)](
        x, x_scale, weight, scale, bias, to, rows, width, depth, share, PARTIAL=parts > 1,
        EVEN=depth % sizes["BLOCK_K"] == 0, **given, **sizes,
    )  # fmt: skip
    if parts > 1:
        last = tune.launch("linear_sum")
        grid = (rows, triton.cdiv(width, last["BLOCK"]))
        _sum_kernel[grid](to, x_scale, scale, bias, out, rows, width, parts, **given, **last)
    return out


def _class(rows: int, x: Tensor) -> str:
    """The class of shapes in the table."""
    if x.dtype == torch.float32:
        return "wide"
    return "few" if rows <= 16 else "some" if rows <= _FEW else f"{8 * x.itemsize}"
