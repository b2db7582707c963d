"""Paged attention in Triton: query tiles over tiles of keys, with split-K for long contexts (FlashAttention, FlashDecoding).

A tile holds the query heads of one key head and as many rows of one request as fit, so that a decode row also fills a matrix
instruction. Softmax is online (arXiv 2307.08691). Tiles of keys that every row attends to are not masked. If there are fewer
tiles than the GPU runs at once, the keys of each tile are split, and a second kernel combines the splits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..gpu.launch_table import TABLE
from ..kv_quant import is_quantized
from ..kv_quant.triton import scale_views, widen, write_quantized
from ..metadata import AttentionMetadata
from ..native import contiguous_heads
from ..varlen.triton import split_head_dim
from .query_tiles import MAX_SPLITS, QueryTiles, num_splits, query_tiles_of

LOG2E = math.log2(math.e)
MIN_TILES = 2  # least number of key tiles in a split
UNSPECIALIZED = ["table_stride", "num_rows", "window"]  # these differ from step to step and must not cause a recompilation
UNALIGNED = ["tile_ptr", "start_ptr", "length_ptr", "table_ptr", "key_range_ptr"]


@triton.jit
def _load_columns(ptr, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load `[rows, WIDTH]` from column FIRST of the rows at `at`; 0 beyond DIM and, if MASKED, for rows not `inside`."""
    column = FIRST + tl.arange(0, WIDTH)
    where = ptr + at[:, None] + column[None, :]
    if FIRST + WIDTH > DIM:
        if MASKED:
            return tl.load(where, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        return tl.load(where, mask=(column < DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(where, mask=inside[:, None], other=0.0)
    return tl.load(where)


@triton.jit
def _load_blocks(table_ptr, key, inside, BLOCK_SIZE: tl.constexpr):
    """Load the physical block of each key."""
    return tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0)


@triton.jit
def _row_and_head(lane, offset, count, head_tile, GROUP: tl.constexpr, HEADS_PER_TILE: tl.constexpr, ROWS: tl.constexpr):
    """Return for each lane of a tile: the row of its request, the query head within its group, and whether it has work.

    Lanes without work repeat the last row or head, so that their loads are in bounds and they attend to no other keys.
    """
    offs_m, head = offset + lane // HEADS_PER_TILE, head_tile * HEADS_PER_TILE + lane % HEADS_PER_TILE
    mine = (lane < ROWS * HEADS_PER_TILE) & (offs_m < count) & (head < GROUP)
    return tl.minimum(tl.minimum(offs_m, offset + ROWS - 1), count - 1), tl.minimum(head, GROUP - 1), mine


@triton.jit
def _store_columns(ptr, at, mine, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    mask = mine[:, None] & (column < DIM)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _key_range(key_range_ptr, row, offs_m, count, length, num_rows, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the first key and the end of keys of each row of a tile."""
    stop = (length - count + 1) + offs_m if CAUSAL else length + 0 * offs_m
    first = 0 * offs_m
    if WINDOWED:
        first = tl.maximum(stop - window, 0)
    if key_range_ptr is not None:
        first, stop = tl.load(key_range_ptr + row).to(tl.int32), tl.load(key_range_ptr + num_rows + row).to(tl.int32)
    return first, stop


@triton.jit
def _key_bounds(
    first, stop, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MIN_TILES: tl.constexpr, BATCH_INVARIANT: tl.constexpr
):  # fmt: skip
    """Return four bounds of a program's keys: first key, first and end of the keys that all its rows attend to, and end."""
    at, end = tl.min(first, 0) // BLOCK_N * BLOCK_N, tl.max(stop, 0)
    if SPLIT:
        steps = tl.cdiv(tl.maximum(end - at, 0), BLOCK_N)
        steps = tl.maximum(tl.cdiv(steps, tl.num_programs(2)), MIN_TILES)
        at += tl.program_id(2) * steps * BLOCK_N
        end = tl.minimum(end, at + steps * BLOCK_N)
    full_start = tl.minimum(tl.maximum(tl.cdiv(tl.max(first, 0), BLOCK_N) * BLOCK_N, at), tl.maximum(at, end))
    full_end = tl.maximum(tl.minimum(tl.min(stop, 0), end) // BLOCK_N * BLOCK_N, full_start)
    if BATCH_INVARIANT:
        full_start, full_end = at, at
    return at, full_start, full_end, end


@triton.jit
def _accumulate(
    m_i, l_i, acc_lo, acc_hi, q_lo, q_hi, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, at, scale_at, inside, key, first, stop,
    cap_scale, qk_scale, DIM_LO: tl.constexpr, DIM_HI: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, SOFT_CAP: tl.constexpr, SHARED_KV: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the online softmax: m_i `[BLOCK_M]`, l_i `[BLOCK_M]` and both parts of the output.

    The tile is at `at` and has keys `key`. MASKED: some rows do not attend to all of these. The scales of a quantised cache are
    at `scale_at` and are multiplied into scores and weights.
    """
    k_lo = widen(_load_columns(k_ptr, at, inside, 0, DIM_LO, DIM, MASKED), q_lo.dtype)
    score = tl.dot(q_lo, tl.trans(k_lo), input_precision="ieee")
    if DIM_HI:
        k_hi = widen(_load_columns(k_ptr, at, inside, DIM_LO, DIM_HI, DIM, MASKED), q_lo.dtype)
        score = tl.dot(q_hi, tl.trans(k_hi), score, input_precision="ieee")
    if k_scale_ptr is not None:
        score = score * tl.load(k_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
    if SOFT_CAP:
        score = 1.0 - 2.0 / (1.0 + tl.exp2(score * cap_scale))
    if MASKED:
        sees = key[None, :] < stop[:, None]
        if HAS_FIRST:
            sees = sees & (key[None, :] >= first[:, None])
        score = tl.where(sees, score, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(score, 1))
    alpha = tl.exp2((m_i - m_new) * qk_scale)
    weight = tl.exp2(score * qk_scale - (m_new * qk_scale)[:, None])
    l_i = l_i * alpha + tl.sum(weight, 1)
    # a weight multiplied with its scale may be too small for float16
    kind: tl.constexpr = tl.bfloat16 if q_lo.dtype == tl.float16 else q_lo.dtype
    if v_scale_ptr is not None:
        weight = weight * tl.load(v_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
    v_lo = k_lo if SHARED_KV else widen(_load_columns(v_ptr, at, inside, 0, DIM_LO, DIM, MASKED), kind)
    weight = weight.to(v_lo.dtype)
    acc_lo = tl.dot(weight, v_lo, acc_lo * alpha[:, None], input_precision="ieee")
    if DIM_HI:
        v_hi = k_hi if SHARED_KV else widen(_load_columns(v_ptr, at, inside, DIM_LO, DIM_HI, DIM, MASKED), kind)
        acc_hi = tl.dot(weight, v_hi, acc_hi * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc_lo, acc_hi


@triton.jit
def _store_tile(
    out_ptr, lse_ptr, start_ptr, m_i, l_i, acc_lo, acc_hi, begin, offset, count, qk_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS_PER_TILE: tl.constexpr, DIM: tl.constexpr,
    DIM_LO: tl.constexpr, DIM_HI: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the output of each lane and, with splits, its logsumexp. The output of a row without keys is 0."""
    tile, column = tl.program_id(0), tl.program_id(1)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    share = 1.0 / tl.where(l_i > 0.0, l_i, 1.0)
    # The lanes are computed again, with a 0 that the compiler cannot know; otherwise they take registers in the loop over keys.
    lane = tl.arange(0, BLOCK_M) + tl.load(start_ptr, volatile=True)
    rows: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    offs_m, head, mine = _row_and_head(lane, offset, count, column % HEAD_TILES, GROUP, HEADS_PER_TILE, rows)
    at = ((begin + offs_m).to(tl.int64) * (KV_HEADS * GROUP) + column // HEAD_TILES * GROUP + head) * DIM
    if lse_ptr is not None:
        split_at = (tile.to(tl.int64) * tl.num_programs(1) + column) * tl.num_programs(2) + tl.program_id(2)
        at = (split_at * BLOCK_M + lane) * DIM
        tl.store(lse_ptr + split_at * BLOCK_M + lane, tl.where(l_i > 0.0, m_i * qk_scale + tl.log2(l_i), float("-inf")))
        mine = mine & (l_i > 0.0)
    _store_columns(out_ptr, at, mine, acc_lo * share[:, None], 0, DIM_LO, DIM)
    if DIM_HI:
        _store_columns(out_ptr, at, mine, acc_hi * share[:, None], DIM_LO, DIM_HI, DIM)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def _attend_kernel(
    q_ptr,  # [rows, heads, DIM], row stride q_stride
    k_ptr,  # [slots, ROW]: keys [KV_HEADS, DIM], if quantised followed by padding and scales
    v_ptr,  # [slots, ROW]
    k_scale_ptr,  # the same memory as float32 [slots, ROW / 4], which ends with KV_HEADS scales; None: not quantised
    v_scale_ptr,
    out_ptr,  # [rows, heads, DIM]; with splits float32 [tiles, columns, splits, BLOCK_M, DIM]
    lse_ptr,  # with splits float32 [tiles, columns, splits, BLOCK_M]: logsumexp in base 2; else None
    tile_ptr,  # int32 [tiles, 2]: request, first row in it; None: tile i is request i
    start_ptr,  # int32 [requests + 1]: query_start_loc
    length_ptr,  # int32 [requests]: seq_lens
    table_ptr,  # int32 [requests, table_stride]: block_tables
    key_range_ptr,  # int64 [2, rows] or None
    sink_ptr,  # float32 [heads]: attention sinks; None: none
    q_stride,
    table_stride,
    num_rows,
    window,
    cap_scale,  # with a soft cap: factor from q . k to 2 log2(e) score / cap
    qk_scale,  # factor from q . k, or from a capped score, to log2(e) score
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEADS_PER_TILE: tl.constexpr,  # query heads in a tile
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    DIM_LO: tl.constexpr,  # DIM as the sum of two powers of two, the second may be 0
    DIM_HI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_FIRST: tl.constexpr,  # some rows do not attend to the first keys
    SOFT_CAP: tl.constexpr,
    SHARED_KV: tl.constexpr,  # keys are the values (MLA)
    MIN_TILES: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,  # all key tiles are masked, so that a row's bits do not depend on the tile's other rows
):
    """Grid (tiles, KV_HEADS * head tiles per group, splits): some rows and query heads of one key head, one split of keys."""
    tile, column = tl.program_id(0), tl.program_id(1)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    request, offset = tile, 0
    if tile_ptr is not None:
        request, offset = tl.load(tile_ptr + 2 * tile), tl.load(tile_ptr + 2 * tile + 1)
    begin = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - begin
    length = tl.load(length_ptr + request)
    kv_head = column // HEAD_TILES

    rows: tl.constexpr = BLOCK_M // HEADS_PER_TILE
    offs_m, head, _ = _row_and_head(tl.arange(0, BLOCK_M), offset, count, column % HEAD_TILES, GROUP, HEADS_PER_TILE, rows)
    row = begin + offs_m
    first, stop = _key_range(key_range_ptr, row, offs_m, count, length, num_rows, window, CAUSAL, WINDOWED)
    low, high = tl.min(first, 0), tl.max(stop, 0)
    at, full_start, full_end, end = _key_bounds(first, stop, BLOCK_N, lse_ptr is not None, MIN_TILES, BATCH_INVARIANT)

    q_at = row.to(tl.int64) * q_stride + (kv_head * GROUP + head) * DIM
    q_lo = _load_columns(q_ptr, q_at, None, 0, DIM_LO, DIM, False)
    acc_lo = tl.zeros([BLOCK_M, DIM_LO], tl.float32)
    q_hi, acc_hi = None, None
    if DIM_HI:
        q_hi = _load_columns(q_ptr, q_at, None, DIM_LO, DIM_HI, DIM, False)
        acc_hi = tl.zeros([BLOCK_M, DIM_HI], tl.float32)
    m_i = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that differences are not NaN
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None and tl.program_id(2) == 0:  # counted by the first split only
        m_i = tl.load(sink_ptr + kv_head * GROUP + head) * (1.4426950408889634 / qk_scale)
        l_i = l_i + 1.0
    table_ptr += request.to(tl.int64) * table_stride

    lanes = tl.arange(0, BLOCK_N)
    # Phase 1: the keys that all rows attend to, without a mask. Phases 0 and 2: the keys before and after them.
    for phase in tl.static_range(3):
        from_, to = at, full_start
        if phase == 1:
            from_, to = full_start, full_end
        if phase == 2:
            from_, to = full_end, end
        if phase == 2 or (not BATCH_INVARIANT and (phase == 1 or HAS_FIRST)):
            block = _load_blocks(table_ptr, from_ + lanes, (from_ + lanes >= low) & (from_ + lanes < to), BLOCK_SIZE)
            for tile_at in range(from_, to, BLOCK_N):
                key = tl.multiple_of(tile_at, BLOCK_N) + lanes
                inside = (key >= low) & (key < high)
                slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
                k_at, scale_at = slot * ROW + kv_head * DIM, (slot + 1) * (ROW // 4) - KV_HEADS + kv_head
                block = _load_blocks(table_ptr, key + BLOCK_N, key + BLOCK_N < to, BLOCK_SIZE)  # early: addresses depend on it
                m_i, l_i, acc_lo, acc_hi = _accumulate(
                    m_i, l_i, acc_lo, acc_hi, q_lo, q_hi, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    k_at, scale_at, inside, key, first, stop, cap_scale, qk_scale,
                    DIM_LO, DIM_HI, DIM, phase != 1, HAS_FIRST, SOFT_CAP, SHARED_KV,
                )  # fmt: skip

    _store_tile(
        out_ptr, lse_ptr, start_ptr, m_i, l_i, acc_lo, acc_hi, begin, offset, count, qk_scale,
        KV_HEADS, GROUP, HEADS_PER_TILE, DIM, DIM_LO, DIM_HI, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=UNALIGNED[:2])
def _combine_splits_kernel(
    split_ptr,  # float32 [tiles, columns, splits, BLOCK_M, DIM], each normalised by itself
    lse_ptr,  # float32 [tiles, columns, splits, BLOCK_M]
    out_ptr,
    tile_ptr,
    start_ptr,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two
    WIDTH: tl.constexpr,
):
    """Grid (tiles, columns, lanes): combine the splits of one row and head of a tile, weighted by their logsumexp."""
    tile, column, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    request, offs_m = tile, lane // HEADS_PER_TILE
    if tile_ptr is not None:
        request, offs_m = tl.load(tile_ptr + 2 * tile), tl.load(tile_ptr + 2 * tile + 1) + offs_m
    begin = tl.load(start_ptr + request)
    head = (column % HEAD_TILES) * HEADS_PER_TILE + lane % HEADS_PER_TILE
    if (offs_m < tl.load(start_ptr + request + 1) - begin) & (head < GROUP):
        part = tl.arange(0, SPLITS)
        split_at = (tile.to(tl.int64) * tl.num_programs(1) + column) * splits + part
        weight = tl.load(lse_ptr + split_at * BLOCK_M + lane, mask=part < splits, other=float("-inf"))
        some = weight > float("-inf")
        m_i = tl.maximum(tl.max(weight, 0), -1e30)
        weight = tl.exp2(weight - m_i)
        l_i = tl.sum(weight, 0)
        weight = weight / tl.where(l_i > 0.0, l_i, 1.0)
        out_ptr += ((begin + offs_m).to(tl.int64) * (KV_HEADS * GROUP) + column // HEAD_TILES * GROUP + head) * DIM
        for first in tl.static_range(0, DIM, WIDTH):
            at = first + tl.arange(0, WIDTH)
            mask = some[:, None] & (at < DIM)[None, :]
            partial = tl.load(split_ptr + (split_at * BLOCK_M + lane)[:, None] * DIM + at[None, :], mask=mask, other=0.0)
            partial = tl.sum(partial * weight[:, None], 0)
            tl.store(out_ptr + at, partial.to(out_ptr.dtype.element_ty), mask=at < DIM)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _write_kernel(k_ptr, v_ptr, k_out_ptr, v_out_ptr, slot_ptr, k_stride, v_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, parts of a row): copy a part of one key and value row to its slot. Rows with a negative slot are skipped."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row)
    mask = (at < SIZE) & (slot >= 0)
    tl.store(k_out_ptr + slot * SIZE + at, tl.load(k_ptr + row * k_stride + at, mask=mask), mask=mask)
    if v_ptr is not None:
        tl.store(v_out_ptr + slot * SIZE + at, tl.load(v_ptr + row * v_stride + at, mask=mask), mask=mask)


def write_cache(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Write k and v as `reference.write_cache` does, skipping negative slots."""
    if is_quantized(kv_cache):
        assert v is not None, "a quantised cache has keys and values"
        return write_quantized(k, v, kv_cache, meta.slot_mapping)
    k, v = contiguous_heads(k), None if v is None else contiguous_heads(v)
    size = k.shape[1] * k.shape[2]
    config = launch_config.get_config("write_cache")
    if k.shape[0]:
        grid = (k.shape[0], triton.cdiv(size, config["BLOCK"]))
        planes = (kv_cache[0], None if v is None else kv_cache[1])
        strides = (k.stride(0), 0 if v is None else v.stride(0))
        _write_kernel[grid](k, v, *planes, meta.slot_mapping, *strides, SIZE=size, **config)


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention.paged_attention`."""
    if k is not None:
        write_cache(k, v, kv_cache, meta)
    return attend(q, kv_cache, meta, scale, soft_cap, sinks)


def attend(
    q: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys and values that are in the cache already. `scale` is positive.

    Launches depend on shapes and on the Python ints of `meta`, never on the content of a tensor. A captured decode step can
    therefore be replayed with other lengths, tables and slots in the same tensors. A request of length 0 gives zeros. With
    `meta.batch_invariant` all tiles have the same size and keys are not split.
    """
    assert kv_cache.is_contiguous(), "a slot's address follows from its number"
    assert scale > 0.0, "the largest product must make the largest score"
    q, group = contiguous_heads(q), q.shape[1] // kv_cache.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kinds = ("invariant",) if meta.batch_invariant else ("decode" if group <= 16 else "heads", "prompt")
    configs = [_config(kind, q, is_quantized(kv_cache)) for kind in kinds]
    at_once = [max(1, config["BLOCK_M"] // group) for config in configs]  # rows of a request in a tile
    cut = query_tiles_of(meta, 0, *at_once)[1:] if meta.batch_invariant else query_tiles_of(meta, *at_once)
    for tiles, config in zip(cut, configs, strict=True):
        _launch(q, kv_cache, out, meta, tiles, config, scale, soft_cap, sinks)
    return out


def _config(kind: str, q: Tensor, quantized: bool) -> dict[str, int]:
    shape = f"{kind} {max(64, triton.next_power_of_2(sum(split_head_dim(q.shape[2]))))}"
    if q.dtype == torch.float32:
        shape += " float32"
    elif quantized and f"{shape} quant" in TABLE["paged_attention"]:
        shape += " quant"
    return launch_config.get_config("paged_attention", shape)


def _launch(
    q: Tensor, kv_cache: Tensor, out: Tensor, meta: AttentionMetadata, tiles: QueryTiles, config: dict[str, int],
    scale: float, soft_cap: float | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    if not tiles.count:
        return
    n, dim, kv_heads, group = q.shape[0], q.shape[2], kv_cache.shape[3], q.shape[1] // kv_cache.shape[3]
    block, (dim_lo, dim_hi) = config["BLOCK_M"], split_head_dim(dim)
    heads_per_tile = min(group, block)
    columns = kv_heads * -(-group // heads_per_tile)
    splits = 1 if meta.batch_invariant else _num_splits_of(tiles, columns, config)
    result, lse = out, None
    if splits > 1:
        lse = torch.empty((tiles.count, columns, splits, block), dtype=torch.float32, device=q.device)
        result = torch.empty((*lse.shape, dim), dtype=torch.float32, device=q.device)
    starts, lengths = meta.device_starts_and_lens
    where = (meta.block_tables, meta.key_range, sinks, q.stride(0), meta.block_tables.stride(0), n, meta.window or 0)
    qk_scale = LOG2E * (soft_cap or scale)
    head_sizes = {"KV_HEADS": kv_heads, "GROUP": group, "HEADS_PER_TILE": heads_per_tile, "DIM": dim}
    _attend_kernel[(tiles.count, columns, splits)](
        q, kv_cache[0], kv_cache[-1], *scale_views(kv_cache), result, lse, tiles.table, starts, lengths, *where,
        2 * LOG2E * scale / soft_cap if soft_cap else 0.0, qk_scale,
        **head_sizes, ROW=kv_cache.stride(2), DIM_LO=dim_lo, DIM_HI=dim_hi, BLOCK_SIZE=meta.block_size, CAUSAL=meta.causal,
        WINDOWED=meta.window is not None, HAS_FIRST=not meta.full_attention,
        SOFT_CAP=soft_cap is not None, SHARED_KV=len(kv_cache) == 1, MIN_TILES=MIN_TILES,
        BATCH_INVARIANT=meta.batch_invariant, **config,
    )  # fmt: skip
    if lse is not None:
        _combine_splits_kernel[(tiles.count, columns, block // heads_per_tile * heads_per_tile)](
            result, lse, out, tiles.table, starts, splits, **head_sizes, BLOCK_M=block,
            SPLITS=16 if splits <= 16 else MAX_SPLITS, **launch_config.get_config("combine_splits"),
        )  # fmt: skip


def _num_splits_of(tiles: QueryTiles, columns: int, config: dict[str, int]) -> int:
    """Return the number of splits of the keys of every tile. Splits of large tiles only pay off on a half-empty GPU."""
    many = config["BLOCK_M"] > 32
    slots = launch_config.gpu_info().num_sms * (1 if many else 2)
    longest_tiles = tiles.keys * columns / max(1, tiles.longest)
    if many and longest_tiles >= slots:
        return 1
    return num_splits(round(longest_tiles, 1), tiles.longest // (MIN_TILES * config["BLOCK_N"]), slots)
