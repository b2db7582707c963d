"""Rotation of heads as a Triton kernel: alone, or between the norms of heads and the cache in one launch. Knows no axes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tune


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,  # float32 [rows, half]
    sin_ptr,
    x_row,
    x_head,
    heads,
    half,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    mask = (head < heads)[:, None] & (column < half)[None, :]
    c = tl.load(cos_ptr + row * half + column, mask=column < half, other=0.0)[None, :]
    s = tl.load(sin_ptr + row * half + column, mask=column < half, other=0.0)[None, :]
    first, step = (column * 2, 1) if NEIGHBOURS else (column, half)
    a_ptr = x_ptr + row * x_row + (head * x_head)[:, None] + first[None, :]
    a, b = tl.load(a_ptr, mask=mask).to(tl.float32), tl.load(a_ptr + step, mask=mask).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(a_ptr, (a * c - b * s).to(kind), mask=mask)
    tl.store(a_ptr + step, (b * c + a * s).to(kind), mask=mask)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> None:
    """As `rope.rotate_`; the numbers of a head end to end."""
    rows, heads, dim = x.shape
    if not x.numel():
        return
    block = triton.next_power_of_2(dim // 2)
    config = tune.launch("rotary", str(block))
    grid = (rows, triton.cdiv(heads, config["HEADS"]))
    turns = (cos.contiguous(), sin.contiguous())
    _rotate_kernel[grid](x, *turns, x.stride(0), x.stride(1), heads, dim // 2, NEIGHBOURS=neighbours, BLOCK=block, **config)


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Float32 numbers as they would be, had they been stored: where norm.rms_norm_reference rounds."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def _part(
    x_ptr,  # of the first head of a part of the row, heads `dim` apart
    out_ptr,  # where they go
    weight_ptr,  # [dim]; None: heads are not normed
    cos_ptr,  # float32 [half] of the row; None: heads are not turned
    sin_ptr,
    heads,
    tile,
    dim,
    half,
    eps,
    offset,
    OFFSET: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """HEADS heads as pairs of numbers; pairs that are not turned lie behind those that are."""
    head, pair = tile * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    first, second = pair * 2, pair * 2 + 1
    if not NEIGHBOURS:
        first = tl.where(pair < half, pair, half + pair)
        second = first + tl.where(pair < half, half, dim // 2 - half)
    inside = pair < dim // 2
    kind = x_ptr.dtype.element_ty
    mask = (head < heads)[:, None] & inside[None, :]
    at_a, at_b = (head * dim)[:, None] + first[None, :], (head * dim)[:, None] + second[None, :]
    a = tl.load(x_ptr + at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at_b, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / dim + eps)[:, None]
        w_a = tl.load(weight_ptr + first, mask=inside, other=0.0).to(tl.float32)[None, :]
        w_b = tl.load(weight_ptr + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        if OFFSET:
            a, b = a * scale * (w_a + offset), b * scale * (w_b + offset)
        else:
            a, b = _rounded(a * scale, kind) * w_a, _rounded(b * scale, kind) * w_b
        a, b = _rounded(a, kind), _rounded(b, kind)
    if cos_ptr is not None:
        c = tl.load(cos_ptr + pair, mask=pair < half, other=1.0)[None, :]
        s = tl.load(sin_ptr + pair, mask=pair < half, other=0.0)[None, :]
        a, b = a * c - b * s, b * c + a * s
    tl.store(out_ptr + at_a, a.to(kind).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + at_b, b.to(kind).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place_kernel(
    x_ptr,  # [rows, heads + keys + values, dim]
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,  # float32 [rows, half]
    sin_ptr,
    k_cache_ptr,  # [slots, kv_heads, dim]
    v_cache_ptr,
    slot_ptr,
    x_row,
    heads,
    kv_heads,
    dim,
    half,
    eps,
    offset,
    OFFSET: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # of half a head
):
    """Some heads of one row: queries stay where they are, keys and values go into the cache if their slot is not negative."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles, kv_tiles = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    x_ptr += row * x_row
    if cos_ptr is not None:
        cos_ptr, sin_ptr = cos_ptr + row * half, sin_ptr + row * half
    slot = tl.load(slot_ptr + row).to(tl.int64) * kv_heads * dim
    if tile < q_tiles:
        _part(
            x_ptr, x_ptr, q_weight_ptr, cos_ptr, sin_ptr, heads, tile, dim, half, eps, offset,
            OFFSET, NEIGHBOURS, HEADS, BLOCK,
        )  # fmt: skip
    elif slot >= 0:
        x_ptr, tile = x_ptr + heads * dim, tile - q_tiles
        if tile < kv_tiles:
            _part(
                x_ptr, k_cache_ptr + slot, k_weight_ptr, cos_ptr, sin_ptr, kv_heads, tile, dim, half, eps, offset,
                OFFSET, NEIGHBOURS, HEADS, BLOCK,
            )  # fmt: skip
        else:
            _part(
                x_ptr + kv_heads * dim, v_cache_ptr + slot, None, None, None, kv_heads, tile - kv_tiles, dim, half, eps, offset,
                OFFSET, NEIGHBOURS, HEADS, BLOCK,
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
    half = 0 if turns is None else turns[0].shape[1]
    cos, sin = (None, None) if turns is None else turns
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, 0.0)
    block = triton.next_power_of_2(dim // 2)
    config = tune.launch("rotary_cache", str(block))
    tiles = triton.cdiv(heads - 2 * kv_heads, config["HEADS"]) + 2 * triton.cdiv(kv_heads, config["HEADS"])
    sizes = (qkv.stride(0), heads - 2 * kv_heads, kv_heads, dim, half, eps, offset)
    constants = {"OFFSET": offset != 0.0, "NEIGHBOURS": neighbours, "BLOCK": block}
    _place_kernel[(rows, tiles)](
        qkv, q_weight, k_weight, cos, sin, kv_cache[0], kv_cache[1], slots, *sizes, **constants, **config
    )
