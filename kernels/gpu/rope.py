"""Rotary embedding in Triton: alone, or fused with QK norm and the write to the KV cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import launch_config
from .kv_quant import quantize_with_scale, row_absmax, scale_from_absmax, scale_views


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
    """Round float32 values to KIND and back, where norm.rms_norm_reference rounds."""
    return x.to(KIND).to(tl.float32)


@triton.jit
def _part(
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
    head = tile * HEADS + tl.arange(0, HEADS)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    stored: tl.constexpr = out_ptr.dtype.element_ty
    a, b = _load_pairs(x_ptr, head * apart, head < heads, DIM, HALF, INTERLEAVED, HEADS, BLOCK)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        one = tl.arange(0, 1)
        w_a, w_b = _load_pairs(weight_ptr, one, one == 0, DIM, HALF, INTERLEAVED, 1, BLOCK)
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
    _part(
        x_ptr, x_ptr, None, x_head, None, cos_ptr + row * HALF, sin_ptr + row * HALF, heads, tl.program_id(1), 0.0, 0.0,
        False, 2 * HALF, HALF, INTERLEAVED, HEADS, BLOCK,
    )  # fmt: skip


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Compute `rope.rotate_`; heads must be contiguous."""
    rows, heads, dim = x.shape
    if not x.numel():
        return
    block = triton.next_power_of_2(dim // 2)
    config = launch_config.get_config("rotary", str(block))
    grid = (rows, triton.cdiv(heads, config["HEADS"]))
    constants = {"HALF": dim // 2, "INTERLEAVED": interleaved, "BLOCK": block}
    _rotate_kernel[grid](x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), heads, **constants, **config)


@triton.jit
def _prepare_qkv_kernel(
    x_ptr,  # [rows, heads + 2 * kv_heads, DIM]
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,  # float32 [rows, HALF]
    sin_ptr,
    k_cache_ptr,  # [slots, cache_row]: keys [kv_heads, DIM], if quantised followed by padding and scales
    v_cache_ptr,
    k_scale_ptr,  # the same memory as float32 [slots, cache_row / 4], which ends with kv_heads scales; None: not quantised
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
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least half a head
):
    """Grid (rows, head tiles of q, k and v): q stays in place, k and v go to the cache unless their slot is negative."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles, kv_tiles = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    x_ptr += row * x_row
    if cos_ptr is not None:
        cos_ptr, sin_ptr = cos_ptr + row * HALF, sin_ptr + row * HALF
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if tile < q_tiles:
        _part(
            x_ptr, x_ptr, None, DIM, q_weight_ptr, cos_ptr, sin_ptr, heads, tile, eps, offset,
            OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
        )  # fmt: skip
    elif slot >= 0:
        x_ptr, tile = x_ptr + heads * DIM, tile - q_tiles
        if k_scale_ptr is not None:
            scales = (slot + 1) * (cache_row // 4) - kv_heads
            k_scale_ptr, v_scale_ptr = k_scale_ptr + scales, v_scale_ptr + scales
        if tile < kv_tiles:
            _part(
                x_ptr, k_cache_ptr + slot * cache_row, k_scale_ptr, DIM, k_weight_ptr, cos_ptr, sin_ptr, kv_heads, tile,
                eps, offset, OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
            )  # fmt: skip
        else:
            _part(
                x_ptr + kv_heads * DIM, v_cache_ptr + slot * cache_row, v_scale_ptr, DIM, None, None, None, kv_heads,
                tile - kv_tiles, eps, offset, OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
            )  # fmt: skip


def prepare_qkv_(
    qkv: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    norms: tuple[Tensor, Tensor, float, float] | None,
) -> None:
    """Compute `qkv_prepare.prepare_qkv` with a contiguous cache and `slots [rows]`. Rows with a negative slot are skipped."""
    rows, heads, dim = qkv.shape
    kv_heads = kv_cache.shape[3]
    if not rows:
        return
    cos, sin = (None, None) if cos_sin is None else cos_sin
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, 0.0)
    block = triton.next_power_of_2(dim // 2)
    config = launch_config.get_config("qkv_prepare", str(block))
    tiles = triton.cdiv(heads - 2 * kv_heads, config["HEADS"]) + 2 * triton.cdiv(kv_heads, config["HEADS"])
    tensors = (qkv, q_weight, k_weight, cos, sin, kv_cache[0], kv_cache[1], *scale_views(kv_cache), slots)
    half = 0 if cos_sin is None else cos_sin[0].shape[1]
    constants = {"OFFSET": offset != 0.0, "DIM": dim, "HALF": half, "INTERLEAVED": interleaved, "BLOCK": block}
    sizes = (qkv.stride(0), kv_cache.stride(2), heads - 2 * kv_heads, kv_heads)
    _prepare_qkv_kernel[(rows, tiles)](*tensors, *sizes, eps, offset, **constants, **config)
