"""Rotation of heads as a Triton kernel: alone, or between the norms of heads and the cache in one launch. Knows no axes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tune
from .kv8 import largest_of, nearest, scale_of, scales_of


@triton.jit
def _at(PART: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Where the first or second number of each pair is in a head: those behind the first 2 * HALF pair up among themselves."""
    pair = tl.arange(0, BLOCK)
    if 2 * HALF == DIM:
        return pair + PART * HALF
    return tl.where(pair < HALF, pair + PART * HALF, pair + HALF + PART * (DIM // 2 - HALF))


@triton.jit
def _pairs(ptr, at, inside, DIM, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Of HEADS heads that begin `at` and are `inside`, the numbers that are turned together, float32 `[HEADS, BLOCK]` each."""
    if NEIGHBOURS:  # read as they lie, so that a thread reads several at once
        column = tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + at[:, None] + column[None, :], mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        a, b = tl.split(tl.reshape(both, (HEADS, BLOCK, 2)))
    else:
        mask = inside[:, None] & (tl.arange(0, BLOCK) < DIM // 2)[None, :]
        a = tl.load(ptr + at[:, None] + _at(0, DIM, HALF, BLOCK)[None, :], mask=mask, other=0.0)
        b = tl.load(ptr + at[:, None] + _at(1, DIM, HALF, BLOCK)[None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _put(ptr, at, inside, a, b, DIM, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The other way round."""
    if NEIGHBOURS:
        column = tl.arange(0, 2 * BLOCK)
        both = tl.reshape(tl.join(a, b), (HEADS, 2 * BLOCK))
        tl.store(ptr + at[:, None] + column[None, :], both, mask=inside[:, None] & (column < DIM)[None, :])
    else:
        mask = inside[:, None] & (tl.arange(0, BLOCK) < DIM // 2)[None, :]
        tl.store(ptr + at[:, None] + _at(0, DIM, HALF, BLOCK)[None, :], a, mask=mask)
        tl.store(ptr + at[:, None] + _at(1, DIM, HALF, BLOCK)[None, :], b, mask=mask)


@triton.jit
def _turned(a, b, cos_ptr, sin_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """By the angles of a row, float32 `[HALF]`; pairs behind them stay."""
    pair = tl.arange(0, BLOCK)
    c = tl.load(cos_ptr + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Float32 numbers as they would be, had they been stored: where norm.rms_norm_reference rounds."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def _part(
    x_ptr,  # of the first head of a part of the row
    out_ptr,  # where they go
    scale_ptr,  # and their scales, float32; None: they are not kept in codes
    apart,  # from head to head
    weight_ptr,  # [DIM]; None: heads are not normed
    cos_ptr,  # float32 [HALF] of the row; None: heads are not turned
    sin_ptr,
    heads,
    tile,
    eps,
    offset,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tile * HEADS + tl.arange(0, HEADS)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    stored: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _pairs(x_ptr, head * apart, head < heads, DIM, HALF, NEIGHBOURS, HEADS, BLOCK)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        one = tl.arange(0, 1)
        w_a, w_b = _pairs(weight_ptr, one, one == 0, DIM, HALF, NEIGHBOURS, 1, BLOCK)
        if OFFSET:
            a, b = a * scale * (w_a + offset), b * scale * (w_b + offset)
        else:
            a, b = _rounded(a * scale, kind) * w_a, _rounded(b * scale, kind) * w_b
        a, b = _rounded(a, kind), _rounded(b, kind)
    if cos_ptr is not None:
        a, b = _turned(a, b, cos_ptr, sin_ptr, HALF, BLOCK)
    if scale_ptr is not None:
        a, b = _rounded(a, kind), _rounded(b, kind)
        scale = scale_of(tl.maximum(largest_of(a), largest_of(b)), stored)
        tl.store(scale_ptr + head, scale, mask=head < heads)
        a, b = nearest(a, scale, stored), nearest(b, scale, stored)
    else:
        a, b = a.to(kind).to(stored), b.to(kind).to(stored)
    _put(out_ptr, head * apart, head < heads, a, b, DIM, HALF, NEIGHBOURS, HEADS, BLOCK)


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,  # float32 [rows, HALF]
    sin_ptr,
    x_row,
    x_head,
    heads,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one row, where they are."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    _part(
        x_ptr, x_ptr, None, x_head, None, cos_ptr + row * HALF, sin_ptr + row * HALF, heads, tl.program_id(1), 0.0, 0.0,
        False, 2 * HALF, HALF, NEIGHBOURS, HEADS, BLOCK,
    )  # fmt: skip


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> None:
    """As `rope.rotate_`; the numbers of a head end to end."""
    rows, heads, dim = x.shape
    if not x.numel():
        return
    block = triton.next_power_of_2(dim // 2)
    config = tune.launch("rotary", str(block))
    grid = (rows, triton.cdiv(heads, config["HEADS"]))
    constants = {"HALF": dim // 2, "NEIGHBOURS": neighbours, "BLOCK": block}
    _rotate_kernel[grid](x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), heads, **constants, **config)


@triton.jit
def _place_kernel(
    x_ptr,  # [rows, heads + keys + values, DIM]
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,  # float32 [rows, HALF]
    sin_ptr,
    k_cache_ptr,  # [slots, cache_row]: numbers or codes [kv_heads, DIM], and what stands behind them
    v_cache_ptr,
    k_scale_ptr,  # of codes, the same as float32 [slots, cache_row / 4], of which the last kv_heads are scales; else None
    v_scale_ptr,
    slot_ptr,
    x_row,
    cache_row,
    heads,
    kv_heads,
    eps,
    offset,
    OFFSET: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # of half a head
):
    """Some heads of one row: queries stay where they are, keys and values go into the cache if their slot is not negative."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles, kv_tiles = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    x_ptr += row * x_row
    if cos_ptr is not None:
        cos_ptr, sin_ptr = cos_ptr + row * HALF, sin_ptr + row * HALF
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if tile < q_tiles:
        _part(
            x_ptr, x_ptr, None, DIM, q_weight_ptr, cos_ptr, sin_ptr, heads, tile, eps, offset,
            OFFSET, DIM, HALF, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip
    elif slot >= 0:
        x_ptr, tile = x_ptr + heads * DIM, tile - q_tiles
        if k_scale_ptr is not None:
            scales = (slot + 1) * (cache_row // 4) - kv_heads
            k_scale_ptr, v_scale_ptr = k_scale_ptr + scales, v_scale_ptr + scales
        if tile < kv_tiles:
            _part(
                x_ptr, k_cache_ptr + slot * cache_row, k_scale_ptr, DIM, k_weight_ptr, cos_ptr, sin_ptr, kv_heads, tile,
                eps, offset, OFFSET, DIM, HALF, NEIGHBOURS, HEADS, BLOCK,
            )  # fmt: skip
        else:
            _part(
                x_ptr + kv_heads * DIM, v_cache_ptr + slot * cache_row, v_scale_ptr, DIM, None, None, None, kv_heads,
                tile - kv_tiles, eps, offset, OFFSET, DIM, HALF, NEIGHBOURS, HEADS, BLOCK,
            )  # fmt: skip


def place_(
    qkv: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    turns: tuple[Tensor, Tensor] | None,
    neighbours: bool,
    norms: tuple[Tensor, Tensor, float, float] | None,
) -> None:
    """As `placing.place`, into a contiguous cache at `slots [rows]`; a row whose slot is negative goes nowhere."""
    rows, heads, dim = qkv.shape
    kv_heads = kv_cache.shape[3]
    if not rows:
        return
    cos, sin = (None, None) if turns is None else turns
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, 0.0)
    block = triton.next_power_of_2(dim // 2)
    config = tune.launch("rotary_cache", str(block))
    tiles = triton.cdiv(heads - 2 * kv_heads, config["HEADS"]) + 2 * triton.cdiv(kv_heads, config["HEADS"])
    tensors = (qkv, q_weight, k_weight, cos, sin, kv_cache[0], kv_cache[1], *scales_of(kv_cache), slots)
    half = 0 if turns is None else turns[0].shape[1]
    constants = {"OFFSET": offset != 0.0, "DIM": dim, "HALF": half, "NEIGHBOURS": neighbours, "BLOCK": block}
    sizes = (qkv.stride(0), kv_cache.stride(2), heads - 2 * kv_heads, kv_heads)
    _place_kernel[(rows, tiles)](*tensors, *sizes, eps, offset, **constants, **config)
