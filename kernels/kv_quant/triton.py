"""Quantised KV cache in Triton: quantised writes, and helpers for kernels that read it.

8-bit floats are written and read as bytes with integer operations, so that GPUs without such a dtype work, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..linear.triton.eight_bit import e4m3_to_float16
from ..native import contiguous_heads
from . import MAX_VALUES, is_quantized

_LARGEST_INT8, _LARGEST_E4M3 = tl.constexpr(MAX_VALUES[torch.int8]), tl.constexpr(MAX_VALUES[torch.uint8])


@triton.jit
def widen(x, KIND: tl.constexpr):
    """Convert quantised values to KIND, without their scale (exact). Other dtypes are returned as they are."""
    if x.dtype == tl.uint8:
        x = e4m3_to_float16(x).to(KIND)
    elif x.dtype == tl.int8:
        x = x.to(KIND)
    return x


@triton.jit
def row_absmax(x):
    """Return the absmax of each row; infinity if a value is NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def scale_from_absmax(largest, KIND: tl.constexpr):
    """Return the scale that maps the absmax to the largest value of KIND, the dtype of the cache."""
    return tl.div_rn(tl.maximum(largest, 1e-30), _LARGEST_INT8 if tl.int8 == KIND else _LARGEST_E4M3)


@triton.jit
def quantize_with_scale(x, scale, KIND: tl.constexpr):
    """Quantise `x [rows, n]` with the `scale` of each row, rounding to nearest, ties to even."""
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if tl.int8 == KIND:
        codes = (x + 12582912.0) - 12582912.0  # at 1.5 * 2^23 floats are 1 apart
    else:
        bits = x.to(tl.int32, bitcast=True)
        most = bits & 0x7FFFFFFF
        magnitude = most.to(tl.float32, bitcast=True)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # steps of 2^-9: e4m3's subnormal numbers
        normal = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3)
        codes = tl.where(magnitude < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return codes.to(KIND)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _write_quantized_kernel(
    k_ptr,  # [rows, heads, DIM], row stride k_stride
    v_ptr,
    k_out_ptr,  # quantised [slots, ROW]
    v_out_ptr,
    k_scale_ptr,  # the same memory as float32 [slots, ROW / 4]
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
    """Grid (rows, head tiles, 2): some heads of one key row (or value row). Rows with a negative slot are skipped."""
    row, slot = tl.program_id(0).to(tl.int64), tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    if tl.program_id(2) == 1:
        k_ptr, k_stride, k_out_ptr, k_scale_ptr = v_ptr, v_stride, v_out_ptr, v_scale_ptr
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head[:, None] < heads) & (column < DIM)[None, :] & (slot >= 0)
    at = head[:, None] * DIM + column[None, :]
    x = tl.load(k_ptr + row * k_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = scale_from_absmax(row_absmax(x), k_out_ptr.dtype.element_ty)
    tl.store(k_out_ptr + slot * ROW + at, quantize_with_scale(x, scale, k_out_ptr.dtype.element_ty), mask=inside)
    tl.store(k_scale_ptr + slot * (ROW // 4) + ROW // 4 - heads + head, scale, mask=(head < heads) & (slot >= 0))


def write_quantized(k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write k and v to a quantised cache as `attention.write_cache` does, skipping negative slots."""
    k, v = contiguous_heads(k), contiguous_heads(v)
    n, heads, dim = k.shape
    if not n:
        return
    block = triton.next_power_of_2(dim)
    config = launch_config.get_config("write_kv_quant", str(block))
    planes = (kv_cache[0], kv_cache[1], *scale_views(kv_cache), slots, k.stride(0), v.stride(0), heads)
    sizes = {"DIM": dim, "ROW": kv_cache.stride(2), "BLOCK": block}
    _write_quantized_kernel[(n, triton.cdiv(heads, config["HEADS"]), 2)](k, v, *planes, **sizes, **config)


def scale_views(kv_cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return keys and values of a quantised cache as float32 views, whose rows end with the scales; else None."""
    if not is_quantized(kv_cache):
        return None, None
    keys, values = kv_cache.flatten(3).view(torch.float32)
    return keys, values
