"""Paged attention as Triton kernels: tiles of queries over tiles of keys, long contexts in parts. Imported only where chosen.

A tile holds the query heads of one key head, and as many rows of one request as fit: so a decode row fills a matrix
instruction, too. Softmax runs along (arXiv 2307.08691). Keys that all rows of a tile see are taken without a mask. Where there
are fewer tiles than the card runs at once, the keys of each are cut into parts, which a second kernel joins.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv8 import is_coded
from ..metadata import AttentionMetadata
from ..native import rows
from . import tune
from .kv8 import scales_of, widened, write_codes
from .table import TABLE
from .tiles import MOST_PARTS, Tiles, parts, tiles_of
from .varlen import parts as halves

LOG2E = math.log2(math.e)
LEAST = 2  # tiles of keys in a part
NUMBERS = ["table_stride", "all_rows", "window"]  # differ from step to step: no reason to compile anew
TABLES = ["tile_ptr", "start_ptr", "length_ptr", "table_ptr", "seen_ptr"]


@triton.jit  # type: ignore[untyped-decorator]
def _columns(ptr, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[rows, WIDTH]` from the rows that begin at `at`, from column FIRST on; 0 behind DIM and, where MASKED, not `inside`."""
    column = FIRST + tl.arange(0, WIDTH)
    where = ptr + at[:, None] + column[None, :]
    if FIRST + WIDTH > DIM:
        if MASKED:
            return tl.load(where, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        return tl.load(where, mask=(column < DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(where, mask=inside[:, None], other=0.0)
    return tl.load(where)


@triton.jit  # type: ignore[untyped-decorator]
def _pages(table_ptr, key, inside, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The physical block of each key."""
    return tl.load(table_ptr + key // PAGE, mask=inside, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _place(lane, offset, count, pile, GROUP: tl.constexpr, HEADS: tl.constexpr, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each lane of a tile the row of its request, the query head of its key head, and whether it has work.

    The others repeat the last row or head: what they read exists, and they see no further.
    """
    place, head = offset + lane // HEADS, pile * HEADS + lane % HEADS
    mine = (lane < PLACES * HEADS) & (place < count) & (head < GROUP)
    return tl.minimum(tl.minimum(place, offset + PLACES - 1), count - 1), tl.minimum(head, GROUP - 1), mine


@triton.jit  # type: ignore[untyped-decorator]
def _put(ptr, at, mine, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    column = FIRST + tl.arange(0, WIDTH)
    mask = mine[:, None] & (column < DIM)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _sight(seen_ptr, row, place, count, length, all_rows, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of a tile the first key that it sees, and the one behind the last."""
    stop = (length - count + 1) + place if CAUSAL else length + 0 * place
    first = 0 * place
    if WINDOWED:
        first = tl.maximum(stop - window, 0)
    if seen_ptr is not None:
        first, stop = tl.load(seen_ptr + row).to(tl.int32), tl.load(seen_ptr + all_rows + row).to(tl.int32)
    return first, stop


@triton.jit  # type: ignore[untyped-decorator]
def _stretches(first, stop, BLOCK_N: tl.constexpr, CUT: tl.constexpr, LEAST: tl.constexpr, ALIKE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program's keys begin, where those that all its rows see begin and end, and where its last key ends."""
    at, end = tl.min(first, 0) // BLOCK_N * BLOCK_N, tl.max(stop, 0)
    if CUT:
        steps = tl.cdiv(tl.maximum(end - at, 0), BLOCK_N)
        steps = tl.maximum(tl.cdiv(steps, tl.num_programs(2)), LEAST)
        at += tl.program_id(2) * steps * BLOCK_N
        end = tl.minimum(end, at + steps * BLOCK_N)
    plain = tl.minimum(tl.maximum(tl.cdiv(tl.max(first, 0), BLOCK_N) * BLOCK_N, at), tl.maximum(at, end))
    edge = tl.maximum(tl.minimum(tl.min(stop, 0), end) // BLOCK_N * BLOCK_N, plain)
    if ALIKE:
        plain, edge = at, at
    return at, plain, edge, end


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(  # type: ignore[no-untyped-def]
    most, total, left, right, q_left, q_right, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, at, scale_at, inside, key, first, stop,
    inner, factor, LEFT: tl.constexpr, RIGHT: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, LATE: tl.constexpr, CAPPED: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Highest score, sum of exponentials and both pieces of the weighted sum, with a tile of keys and values added.

    The tile lies `at`, is of keys `key`, and some rows do not see all of it only where MASKED. Codes have scales at `scale_at`,
    which become a part of scores and weights.
    """
    k_left = widened(_columns(k_ptr, at, inside, 0, LEFT, DIM, MASKED), q_left.dtype)
    score = tl.dot(q_left, tl.trans(k_left), input_precision="ieee")
    if RIGHT:
        k_right = widened(_columns(k_ptr, at, inside, LEFT, RIGHT, DIM, MASKED), q_left.dtype)
        score = tl.dot(q_right, tl.trans(k_right), score, input_precision="ieee")
    if k_scale_ptr is not None:
        score = score * tl.load(k_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
    if CAPPED:
        score = 1.0 - 2.0 / (1.0 + tl.exp2(score * inner))
    if MASKED:
        sees = key[None, :] < stop[:, None]
        if LATE:
            sees = sees & (key[None, :] >= first[:, None])
        score = tl.where(sees, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    fade = tl.exp2((most - higher) * factor)
    weight = tl.exp2(score * factor - (higher * factor)[:, None])
    total = total * fade + tl.sum(weight, 1)
    kind: tl.constexpr = (
        tl.bfloat16 if q_left.dtype == tl.float16 else q_left.dtype
    )  # a scaled weight may be too small for halves
    if v_scale_ptr is not None:
        weight = weight * tl.load(v_scale_ptr + scale_at, mask=inside, other=0.0)[None, :]
    v_left = k_left if SAME else widened(_columns(v_ptr, at, inside, 0, LEFT, DIM, MASKED), kind)
    weight = weight.to(v_left.dtype)
    left = tl.dot(weight, v_left, left * fade[:, None], input_precision="ieee")
    if RIGHT:
        v_right = k_right if SAME else widened(_columns(v_ptr, at, inside, LEFT, RIGHT, DIM, MASKED), kind)
        right = tl.dot(weight, v_right, right * fade[:, None], input_precision="ieee")
    return higher, total, left, right


@triton.jit  # type: ignore[untyped-decorator]
def _leave(  # type: ignore[no-untyped-def]
    out_ptr, weight_ptr, start_ptr, most, total, left, right, begin, offset, count, factor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Stores the mean of values of each lane of a tile and, with parts, its weight. A row that sees no key becomes 0."""
    tile, column = tl.program_id(0), tl.program_id(1)
    PILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    # Found again, from a 0 that the compiler cannot know: else it would keep them in registers while keys go by.
    lane = tl.arange(0, BLOCK_M) + tl.load(start_ptr, volatile=True)
    place, head, mine = _place(lane, offset, count, column % PILES, GROUP, HEADS, BLOCK_M // HEADS)
    at = ((begin + place).to(tl.int64) * (KV_HEADS * GROUP) + column // PILES * GROUP + head) * DIM
    if weight_ptr is not None:
        cell = (tile.to(tl.int64) * tl.num_programs(1) + column) * tl.num_programs(2) + tl.program_id(2)
        at = (cell * BLOCK_M + lane) * DIM
        tl.store(weight_ptr + cell * BLOCK_M + lane, tl.where(total > 0.0, most * factor + tl.log2(total), float("-inf")))
        mine = mine & (total > 0.0)
    _put(out_ptr, at, mine, left * share[:, None], 0, LEFT, DIM)
    if RIGHT:
        _put(out_ptr, at, mine, right * share[:, None], LEFT, RIGHT, DIM)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=TABLES)  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, heads, DIM], q_stride from row to row
    k_ptr,  # [slots, ROW]: numbers or codes [KV_HEADS, DIM], and what stands behind them
    v_ptr,
    k_scale_ptr,  # of codes, the same as float32 [slots, ROW / 4], of which the last KV_HEADS are scales; else None
    v_scale_ptr,
    out_ptr,  # [rows, heads, DIM]; with parts [tiles, columns, parts, BLOCK_M, DIM] in float32
    weight_ptr,  # with parts [tiles, columns, parts, BLOCK_M]: log2 of the sum of exponentials; else None
    tile_ptr,  # int32 [tiles, 2]: request, first of its rows; None: tile i is request i
    start_ptr,  # int32 [requests + 1]
    length_ptr,  # int32 [requests]
    table_ptr,  # int32 [requests, table_stride]
    seen_ptr,  # int64 [2, rows] or None
    q_stride,
    table_stride,
    all_rows,
    window,
    inner,  # with a cap: what makes 2 log2(e) score / cap of a product
    factor,  # what makes log2(e) score of a product, or of a capped score
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    HEADS: tl.constexpr,  # of them in a tile
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    LEFT: tl.constexpr,  # columns are taken in two pieces, each a power of two
    RIGHT: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    LATE: tl.constexpr,  # some rows do not see the first keys
    CAPPED: tl.constexpr,
    SAME: tl.constexpr,  # keys are values
    LEAST: tl.constexpr,  # tiles of keys in a part, unless there are fewer
    ALIKE: tl.constexpr,  # every tile of keys is taken the same way, whoever shares it
):
    """One tile of rows, some query heads of one key head, one part of their keys."""
    tile, column = tl.program_id(0), tl.program_id(1)
    PILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    request, offset = tile, 0
    if tile_ptr is not None:
        request, offset = tl.load(tile_ptr + 2 * tile), tl.load(tile_ptr + 2 * tile + 1)
    begin = tl.load(start_ptr + request)
    count = tl.load(start_ptr + request + 1) - begin
    length = tl.load(length_ptr + request)
    kv_head = column // PILES

    place, head, _ = _place(tl.arange(0, BLOCK_M), offset, count, column % PILES, GROUP, HEADS, BLOCK_M // HEADS)
    row = begin + place
    first, stop = _sight(seen_ptr, row, place, count, length, all_rows, window, CAUSAL, WINDOWED)
    low, high = tl.min(first, 0), tl.max(stop, 0)
    at, plain, edge, end = _stretches(first, stop, BLOCK_N, weight_ptr is not None, LEAST, ALIKE)

    q_at = row.to(tl.int64) * q_stride + (kv_head * GROUP + head) * DIM
    q_left = _columns(q_ptr, q_at, None, 0, LEFT, DIM, False)
    left = tl.zeros([BLOCK_M, LEFT], tl.float32)
    q_right, right = None, None
    if RIGHT:
        q_right = _columns(q_ptr, q_at, None, LEFT, RIGHT, DIM, False)
        right = tl.zeros([BLOCK_M, RIGHT], tl.float32)
    most = tl.full([BLOCK_M], -1e30, tl.float32)  # of no scores: its difference from another is a number
    total = tl.zeros([BLOCK_M], tl.float32)
    table_ptr += request.to(tl.int64) * table_stride

    lanes = tl.arange(0, BLOCK_N)
    # Before the keys that all rows see, those keys, and behind them.
    for stretch in tl.static_range(3):
        from_, to = at, plain
        if stretch == 1:
            from_, to = plain, edge
        if stretch == 2:
            from_, to = edge, end
        if stretch == 2 or (not ALIKE and (stretch == 1 or LATE)):
            page = _pages(table_ptr, from_ + lanes, (from_ + lanes >= low) & (from_ + lanes < to), PAGE)
            for tile_at in range(from_, to, BLOCK_N):
                key = tl.multiple_of(tile_at, BLOCK_N) + lanes
                inside = (key >= low) & (key < high)
                slot = page.to(tl.int64) * PAGE + key % PAGE
                k_at, scale_at = slot * ROW + kv_head * DIM, (slot + 1) * (ROW // 4) - KV_HEADS + kv_head
                page = _pages(table_ptr, key + BLOCK_N, key + BLOCK_N < to, PAGE)  # early: addresses wait for it
                most, total, left, right = _absorb(
                    most, total, left, right, q_left, q_right, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    k_at, scale_at, inside, key, first, stop, inner, factor,
                    LEFT, RIGHT, DIM, stretch != 1, LATE, CAPPED, SAME,
                )  # fmt: skip

    _leave(
        out_ptr, weight_ptr, start_ptr, most, total, left, right, begin, offset, count, factor,
        KV_HEADS, GROUP, HEADS, DIM, LEFT, RIGHT, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=TABLES[:2])  # type: ignore[untyped-decorator]
def _join_kernel(  # type: ignore[no-untyped-def]
    part_ptr,  # [tiles, columns, parts, BLOCK_M, DIM] in float32, each as if there were no other
    weight_ptr,  # [tiles, columns, parts, BLOCK_M]
    out_ptr,
    tile_ptr,
    start_ptr,
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # power of two
    WIDTH: tl.constexpr,
):
    """One row and head of a tile."""
    tile, column, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    request, place = tile, lane // HEADS
    if tile_ptr is not None:
        request, place = tl.load(tile_ptr + 2 * tile), tl.load(tile_ptr + 2 * tile + 1) + place
    begin = tl.load(start_ptr + request)
    head = (column % PILES) * HEADS + lane % HEADS
    if (place < tl.load(start_ptr + request + 1) - begin) & (head < GROUP):
        part = tl.arange(0, PARTS)
        cell = (tile.to(tl.int64) * tl.num_programs(1) + column) * parts + part
        weight = tl.load(weight_ptr + cell * BLOCK_M + lane, mask=part < parts, other=float("-inf"))
        some = weight > float("-inf")
        most = tl.maximum(tl.max(weight, 0), -1e30)
        weight = tl.exp2(weight - most)
        total = tl.sum(weight, 0)
        weight = weight / tl.where(total > 0.0, total, 1.0)
        out_ptr += ((begin + place).to(tl.int64) * (KV_HEADS * GROUP) + column // PILES * GROUP + head) * DIM
        for first in tl.static_range(0, DIM, WIDTH):
            at = first + tl.arange(0, WIDTH)
            mask = some[:, None] & (at < DIM)[None, :]
            made = tl.load(part_ptr + (cell * BLOCK_M + lane)[:, None] * DIM + at[None, :], mask=mask, other=0.0)
            made = tl.sum(made * weight[:, None], 0)
            tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), mask=at < DIM)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])  # type: ignore[untyped-decorator]
def _write_kernel(k_ptr, v_ptr, k_out_ptr, v_out_ptr, slot_ptr, k_stride, v_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some numbers of one row of keys and values; a row whose slot is negative goes nowhere."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row)
    mask = (at < SIZE) & (slot >= 0)
    tl.store(k_out_ptr + slot * SIZE + at, tl.load(k_ptr + row * k_stride + at, mask=mask), mask=mask)
    if v_ptr is not None:
        tl.store(v_out_ptr + slot * SIZE + at, tl.load(v_ptr + row * v_stride + at, mask=mask), mask=mask)


def write(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """As `attention.write_cache`; negative slots take nothing."""
    if is_coded(kv_cache):
        assert v is not None, "codes are of keys and values"
        return write_codes(k, v, kv_cache, meta.slot_mapping)
    k, v = rows(k), None if v is None else rows(v)
    size = k.shape[1] * k.shape[2]
    config = tune.launch("write_cache")
    if k.shape[0]:
        grid = (k.shape[0], triton.cdiv(size, config["BLOCK"]))
        planes = (kv_cache[0], None if v is None else kv_cache[1])
        strides = (k.stride(0), 0 if v is None else v.stride(0))
        _write_kernel[grid](k, v, *planes, meta.slot_mapping, *strides, SIZE=size, **config)


def attend(q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, scale: float, soft_cap: float | None = None) -> Tensor:
    """As `attention.paged_attention` once keys are written. `scale` is positive.

    What is launched follows from shapes and from the Python numbers of `meta`, from no tensor's contents: a recorded step of
    requests with a row each can be replayed with other lengths, tables and slots in the same tensors. A request of length 0
    gives zeros. Under `meta.invariant` tiles have one size, and keys are cut nowhere.
    """
    assert kv_cache.is_contiguous(), "a slot's address follows from its number"
    assert scale > 0.0, "the largest product makes the largest score"
    q, group = rows(q), q.shape[1] // kv_cache.shape[3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kinds = ("alike",) if meta.invariant else ("decode" if group <= 16 else "heads", "prompt")
    configs = [_config(kind, q, is_coded(kv_cache)) for kind in kinds]
    at_once = [max(1, config["BLOCK_M"] // group) for config in configs]  # rows of a request in a tile
    cut = tiles_of(meta, 0, *at_once)[1:] if meta.invariant else tiles_of(meta, *at_once)
    for tiles, config in zip(cut, configs, strict=True):
        _launch(q, kv_cache, out, meta, tiles, config, scale, soft_cap)
    return out


def _config(kind: str, q: Tensor, codes: bool) -> dict[str, int]:
    shape = f"{kind} {max(64, triton.next_power_of_2(sum(halves(q.shape[2]))))}"
    coded = f"{shape} codes"
    shape = f"{shape} float32" if q.dtype == torch.float32 else coded if codes and coded in TABLE["paged_attention"] else shape
    return tune.launch("paged_attention", shape)


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    meta: AttentionMetadata,
    tiles: Tiles,
    config: dict[str, int],
    scale: float,
    soft_cap: float | None,
) -> None:
    if not tiles.count:
        return
    n, dim, kv_heads, group = q.shape[0], q.shape[2], kv_cache.shape[3], q.shape[1] // kv_cache.shape[3]
    block, (left, right) = config["BLOCK_M"], halves(dim)
    together = min(group, block)
    columns = kv_heads * -(-group // together)
    cuts = 1 if meta.invariant else _cuts(tiles, columns, config)
    made, weights = out, None
    if cuts > 1:
        cells = (tiles.count, columns, cuts, block)
        made = torch.empty((*cells, dim), dtype=torch.float32, device=q.device)
        weights = torch.empty(cells, dtype=torch.float32, device=q.device)
    starts, lengths = meta.device_bounds
    where = (meta.block_tables, meta.seen, q.stride(0), meta.block_tables.stride(0), n, meta.window or 0)
    factor = LOG2E * (soft_cap or scale)
    heads_ = {"KV_HEADS": kv_heads, "GROUP": group, "HEADS": together, "DIM": dim}
    _attend_kernel[(tiles.count, columns, cuts)](
        q, kv_cache[0], kv_cache[-1], *scales_of(kv_cache), made, weights, tiles.table, starts, lengths, *where,
        2 * LOG2E * scale / soft_cap if soft_cap else 0.0, factor,
        **heads_, ROW=kv_cache.stride(2), LEFT=left, RIGHT=right, PAGE=meta.block_size, CAUSAL=meta.causal,
        WINDOWED=meta.window is not None, LATE=not meta.plain,
        CAPPED=soft_cap is not None, SAME=len(kv_cache) == 1, LEAST=LEAST, ALIKE=meta.invariant, **config,
    )  # fmt: skip
    if weights is not None:
        _join_kernel[(tiles.count, columns, block // together * together)](
            made, weights, out, tiles.table, starts, cuts, **heads_, BLOCK_M=block,
            PARTS=16 if cuts <= 16 else MOST_PARTS, **tune.launch("join_attention"),
        )  # fmt: skip


def _cuts(tiles: Tiles, columns: int, config: dict[str, int]) -> int:
    """Into how many parts the keys of every tile are cut. Parts of many rows are large: only a half-empty card needs them."""
    many = config["BLOCK_M"] > 32
    slots = tune.card().processors * (1 if many else 2)
    alike = tiles.keys * columns / max(1, tiles.longest)
    return 1 if many and alike >= slots else parts(round(alike, 1), tiles.longest // (LEAST * config["BLOCK_N"]), slots)
