"""QK norm, rotary embedding and the write to the KV cache in one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..kv_quant.triton import scale_views
from ..metadata import AttentionMetadata
from ..rope.triton import prepare_heads
from .reference import QKNorms


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
        prepare_heads(
            x_ptr, x_ptr, None, DIM, q_weight_ptr, cos_ptr, sin_ptr, heads, tile, eps, offset,
            OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
        )  # fmt: skip
    elif slot >= 0:
        x_ptr, tile = x_ptr + heads * DIM, tile - q_tiles
        if k_scale_ptr is not None:
            scales = (slot + 1) * (cache_row // 4) - kv_heads
            k_scale_ptr, v_scale_ptr = k_scale_ptr + scales, v_scale_ptr + scales
        if tile < kv_tiles:
            prepare_heads(
                x_ptr, k_cache_ptr + slot * cache_row, k_scale_ptr, DIM, k_weight_ptr, cos_ptr, sin_ptr, kv_heads, tile,
                eps, offset, OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
            )  # fmt: skip
        else:
            prepare_heads(
                x_ptr + kv_heads * DIM, v_cache_ptr + slot * cache_row, v_scale_ptr, DIM, None, None, None, kv_heads,
                tile - kv_tiles, eps, offset, OFFSET, DIM, HALF, INTERLEAVED, HEADS, BLOCK,
            )  # fmt: skip


def prepare_qkv_(
    qkv: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    norms: QKNorms | None,
) -> None:
    """Prepare queries in place; write keys and values to `slots [rows]` of a contiguous cache, but for negative slots."""
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


def prepare_qkv(
    qkv: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    cos_sin: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    qk_norms: QKNorms | None,
) -> tuple[Tensor, None, None]:
    """Compute `qkv_prepare.prepare_qkv`."""
    prepare_qkv_(qkv, kv_cache, meta.slot_mapping, cos_sin, interleaved, qk_norms)
    return qkv[:, : qkv.shape[1] - 2 * kv_cache.shape[3]], None, None
