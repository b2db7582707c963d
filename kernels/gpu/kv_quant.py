"""Rows of a key/value cache in 8 bits, as Triton kernels read and write them. Knows no attention.

Nothing here asks for a card that has 8-bit floats: their bytes are made and read as bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv8 import LARGEST, is_coded
from ..native import rows
from . import tune
from .linear import from_e4m3

_LARGEST_INT8, _LARGEST_E4M3 = tl.constexpr(LARGEST[torch.int8]), tl.constexpr(LARGEST[torch.uint8])


@triton.jit
def widened(x, KIND: tl.constexpr):
    """Codes as numbers of KIND, which holds them exactly; what is in no codes stays as it is."""
    if x.dtype == tl.uint8:
        x = from_e4m3(x).to(KIND)
    elif x.dtype == tl.int8:
        x = x.to(KIND)
    return x


@triton.jit
def largest_of(x):
    """The largest magnitude in each row; infinity where one is no number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def scale_of(largest, KIND: tl.constexpr):
    """What makes the largest code of the largest magnitude; KIND as the cache has it."""
    return tl.div_rn(tl.maximum(largest, 1e-30), _LARGEST_INT8 if tl.int8 == KIND else _LARGEST_E4M3)


@triton.jit
def nearest(x, scale, KIND: tl.constexpr):
    """Codes of numbers `x [rows, n]` with the `scale` of each row, to nearest, ties to even."""
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if tl.int8 == KIND:
        codes = (x + 12582912.0) - 12582912.0  # there floats are 1 apart
    else:
        bits = x.to(tl.int32, bitcast=True)
        most = bits & 0x7FFFFFFF
        magnitude = most.to(tl.float32, bitcast=True)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # there they are 2^-9 apart, as e4m3's first are
        normal = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3)
        codes = tl.where(magnitude < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return codes.to(KIND)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _write_codes_kernel(
    k_ptr,  # [rows, heads, DIM], k_stride from row to row
    v_ptr,
    k_out_ptr,  # codes [slots, ROW]
    v_out_ptr,
    k_scale_ptr,  # the same as float32 [slots, ROW / 4]
    v_scale_ptr,
    slot_ptr,
    k_stride,
    v_stride,
    heads,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one row of keys or values; a row whose slot is negative goes nowhere."""
    row, slot = tl.program_id(0).to(tl.int64), tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    if tl.program_id(2) == 1:
        k_ptr, k_stride, k_out_ptr, k_scale_ptr = v_ptr, v_stride, v_out_ptr, v_scale_ptr
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head[:, None] < heads) & (column < DIM)[None, :] & (slot >= 0)
    at = head[:, None] * DIM + column[None, :]
    x = tl.load(k_ptr + row * k_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(largest_of(x), k_out_ptr.dtype.element_ty)
    tl.store(k_out_ptr + slot * ROW + at, nearest(x, scale, k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(k_scale_ptr + slot * (ROW // 4) + ROW // 4 - heads + head, scale, mask=(head < heads) & (slot >= 0))


def write_codes(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """As `attention.write_cache` into a cache of codes; negative slots take nothing."""
    k, v = rows(k), rows(v)
    n, heads, dim = k.shape
    if not n:
        return
    block = triton.next_power_of_2(dim)
    config = tune.launch("write_codes", str(block))
    planes = (kv_cache[0], kv_cache[1], *scales_of(kv_cache), slots, k.stride(0), v.stride(0), heads)
    sizes = {"DIM": dim, "ROW": kv_cache.stride(2), "BLOCK": block}
    _write_codes_kernel[(n, triton.cdiv(heads, config["HEADS"]), 2)](k, v, *planes, **sizes, **config)


def scales_of(kv_cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both planes of a cache of codes as float32, whose rows end with the scales; None for one of numbers."""
    if not is_coded(kv_cache):
        return None, None
    keys, values = kv_cache.flatten(3).view(torch.float32)
    return keys, values
