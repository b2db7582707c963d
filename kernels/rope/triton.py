"""Rotary embedding in Triton. `prepare_heads` may also norm heads, and quantise them for the KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..kv_quant.triton import quantize_with_scale, row_absmax, scale_from_absmax
from . import reference


@triton.jit
def _at(PART: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index in a head of the first (PART 0) or second (PART 1) value of each pair; unrotated ones pair up, too."""
    pair = tl.arange(0, BLOCK)
    if 2 * HALF == DIM:
        return pair + PART * HALF
    return tl.where(pair < HALF, pair + PART * HALF, pair + HALF + PART * (DIM // 2 - HALF))


@triton.jit
def _load_pairs(ptr, at, inside, DIM, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Load HEADS heads at `at` as pairs: first and second values, float32 `[HEADS, BLOCK]` each."""
    if INTERLEAVED:  # contiguous loads, so that they are vectorised
        column = tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + at[:, None] + column[None, :], mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(both, (HEADS, BLOCK, 2)))
    else:
        mask = inside[:, None] & (tl.arange(0, BLOCK) < DIM // 2)[None, :]
        a = tl.load(ptr + at[:, None] + _at(0, DIM, HALF, BLOCK)[None, :], mask=mask, other=0.0)
        b = tl.load(ptr + at[:, None] + _at(1, DIM, HALF, BLOCK)[None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store(ptr, at, inside, a, b, DIM, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Store pairs: the inverse of `_load_pairs`."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(a, b), (HEADS, 2 * BLOCK))
        tl.store(ptr + at[:, None] + column[None, :], both, mask=inside[:, None] & (column < DIM)[None, :])
    else:
        mask = inside[:, None] & (tl.arange(0, BLOCK) < DIM // 2)[None, :]
        tl.store(ptr + at[:, None] + _at(0, DIM, HALF, BLOCK)[None, :], a, mask=mask)
        tl.store(ptr + at[:, None] + _at(1, DIM, HALF, BLOCK)[None, :], b, mask=mask)


@triton.jit
def _rotated(a, b, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate pairs by the angles of a row, float32 `[HALF]`. Pairs beyond HALF stay as they are."""
    pair = tl.arange(0, BLOCK)
    c = tl.load(cos_ptr + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Round float32 values to KIND and back, where norm.reference rounds."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def prepare_heads(
    x_ptr,  # first head of q, k or v of a row
    out_ptr,  # where its heads are stored
    scale_ptr,  # float32, where their scales are stored; None: not quantised
    apart,  # head stride
    weight_ptr,  # [DIM]; None: no norm
    cos_ptr,  # float32 [HALF] of the row; None: no rotation
    sin_ptr,
    heads,
    tile,
    eps,
    offset,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm, rotate and store a tile of the heads of a row; each of norm, rotation and quantisation may be left out."""
    head = tile * HEADS + tl.arange(0, HEADS)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    stored: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _load_pairs(x_ptr, head * apart, head < heads, DIM, HALF, INTERLEAVED, HEADS, BLOCK)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        zero = tl.arange(0, 1)
        w_a, w_b = _load_pairs(weight_ptr, zero, zero == 0, DIM, HALF, INTERLEAVED, 1, BLOCK)
        if OFFSET:
            a, b = a * scale * (w_a + offset), b * scale * (w_b + offset)
        else:
            a, b = _rounded(a * scale, kind) * w_a, _rounded(b * scale, kind) * w_b
        a, b = _rounded(a, kind), _rounded(b, kind)
    if cos_ptr is not None:
        a, b = _rotated(a, b, cos_ptr, sin_ptr, HALF, BLOCK)
    if scale_ptr is not None:
        a, b = _rounded(a, kind), _rounded(b, kind)
        scale = scale_from_absmax(tl.maximum(row_absmax(a), row_absmax(b)), stored)
        tl.store(scale_ptr + head, scale, mask=head < heads)
        a, b = quantize_with_scale(a, scale, stored), quantize_with_scale(b, scale, stored)
    else:
        a, b = a.to(kind).to(stored), b.to(kind).to(stored)
    _store(out_ptr, head * apart, head < heads, a, b, DIM, HALF, INTERLEAVED, HEADS, BLOCK)


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,  # float32 [rows, HALF]
    sin_ptr,
    x_row,
    x_head,
    heads,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, head tiles): rotate some heads of one row of x `[rows, heads, 2 * HALF]` in place."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    prepare_heads(
        x_ptr, x_ptr, None, x_head, None, cos_ptr + row * HALF, sin_ptr + row * HALF, heads, tl.program_id(1), 0.0, 0.0,
        False, 2 * HALF, HALF, INTERLEAVED, HEADS, BLOCK,
    )  # fmt: skip


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Compute `rope.rotate_`."""
    rows, heads, dim = x.shape
    if x.stride(2) != 1:
        reference.rotate_(x, cos, sin, interleaved)
        return
    if not x.numel():
        return
    block = triton.next_power_of_2(dim // 2)
    config = launch_config.get_config("rotary", str(block))
    grid = (rows, triton.cdiv(heads, config["HEADS"]))
    constants = {"HALF": dim // 2, "INTERLEAVED": interleaved, "BLOCK": block}
    _rotate_kernel[grid](x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), heads, **constants, **config)
