"""Attention over packed segments in Triton; a program computes some queries of one head.

The head size is split into a power of two and a smaller one (72 into 64 and 16, of which 8 are zeros), so that odd sizes waste
little work. The largest sizes would not fit into registers and are split in halves. Scores are in base 2, and only the
last keys of a segment are masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..gpu.upload import keep_alive, upload

_LEAST = 16  # smallest side of a tensor core tile
_CLASSES = {"64": 127, "128": 128, "192": 255, "256": 256}  # largest head size of each class


@triton.jit
def _rows(ptr, row_size, columns, DIM: tl.constexpr, FULL: tl.constexpr, count, ROWS: tl.constexpr, LAST: tl.constexpr):
    """Load `[ROWS, columns]` from `ptr`; zero beyond the head size and, in the last tile, beyond `count` rows."""
    row = tl.arange(0, ROWS)[:, None]
    at = ptr + row * row_size + columns[None, :]
    if LAST:
        return tl.load(at, mask=(row < count) & (columns < DIM)[None, :], other=0.0)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def _keys(
    q, q_more, acc, acc_more, total, most, k_ptr, v_ptr, k_row, v_row, count, d, e, scale,
    DIM: tl.constexpr, TWO: tl.constexpr, FULL: tl.constexpr, FULL_MORE: tl.constexpr,
    KEYS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the online softmax; the last tile has only `count` keys."""
    k = _rows(k_ptr, k_row, d, DIM, FULL, count, KEYS, LAST)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if TWO:
        k_more = _rows(k_ptr, k_row, e, DIM, FULL_MORE, count, KEYS, LAST)
        scores = tl.dot(q_more, tl.trans(k_more), scores, input_precision="ieee")
    if LAST:
        scores = tl.where((tl.arange(0, KEYS) < count)[None, :], scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(most - higher)
    total = total * fade + tl.sum(p, 1)
    v = _rows(v_ptr, v_row, d, DIM, FULL, count, KEYS, LAST)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
    if TWO:
        v_more = _rows(v_ptr, v_row, e, DIM, FULL_MORE, count, KEYS, LAST)
        acc_more = tl.dot(p, v_more, acc_more * fade[:, None], input_precision="ieee")
    return acc, acc_more, total, higher


@triton.jit
def _varlen_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tiles_ptr, q_row, k_row, v_row, out_row, scale,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr,
    DIM: tl.constexpr, MAIN: tl.constexpr, MORE: tl.constexpr, TWO: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """q, k, v, out `[tokens, heads, DIM]`, tiles `[n, 3]`: first query, start and end of its segment; grid (n, heads).

    `scale` is positive and includes log2(e).
    """
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, start, stop = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1), tl.load(tiles_ptr + 3 * tile + 2)
    d, e = tl.arange(0, MAIN), MAIN + tl.arange(0, MORE)
    FULL: tl.constexpr = MAIN <= DIM
    FULL_MORE: tl.constexpr = MAIN + MORE <= DIM
    q_ptr += first.to(tl.int64) * q_row + head * Q_HEAD
    k_ptr += start.to(tl.int64) * k_row + head * K_HEAD
    v_ptr += start.to(tl.int64) * v_row + head * V_HEAD
    q = _rows(q_ptr, q_row, d, DIM, FULL, stop - first, QUERIES, True)
    q_more = q
    if TWO:
        q_more = _rows(q_ptr, q_row, e, DIM, FULL_MORE, stop - first, QUERIES, True)
    acc, acc_more = tl.zeros([QUERIES, MAIN], tl.float32), tl.zeros([QUERIES, MORE], tl.float32)
    total, most = tl.zeros([QUERIES], tl.float32), tl.full([QUERIES], float("-inf"), tl.float32)

    left = stop - start
    for _ in range(0, left // KEYS):
        acc, acc_more, total, most = _keys(
            q, q_more, acc, acc_more, total, most, k_ptr, v_ptr, k_row, v_row, left, d, e, scale,
            DIM, TWO, FULL, FULL_MORE, KEYS, False,
        )  # fmt: skip
        k_ptr += KEYS * k_row
        v_ptr += KEYS * v_row
    left %= KEYS
    if left > 0:
        acc, acc_more, total, most = _keys(
            q, q_more, acc, acc_more, total, most, k_ptr, v_ptr, k_row, v_row, left, d, e, scale,
            DIM, TWO, FULL, FULL_MORE, KEYS, True,
        )  # fmt: skip

    row = tl.arange(0, QUERIES)[:, None]
    inside, share = first + row < stop, (1.0 / total)[:, None]
    out_ptr += first.to(tl.int64) * out_row + head * DIM + row * out_row
    tl.store(out_ptr + d[None, :], (acc * share).to(out_ptr.dtype.element_ty), mask=inside & (d < DIM)[None, :])
    if TWO:
        tl.store(out_ptr + e[None, :], (acc_more * share).to(out_ptr.dtype.element_ty), mask=inside & (e < DIM)[None, :])


@functools.lru_cache(maxsize=64)
def tiles(lengths: tuple[int, ...], queries: int, device: torch.device) -> Tensor:
    """Return int32 `[n, 3]`, one row per `queries` rows of a segment: first row, start and end of the segment; longest first.

    Cached, because every layer of a tower uses the same table.
    """
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    spans.sort(key=lambda span: span[0] - span[1])
    rows = [(first, *span) for span in spans for first in range(*span, queries)]
    return upload(torch.tensor(rows, dtype=torch.int32).view(-1, 3), device)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Compute `varlen.varlen_attention` for head sizes up to 256. Rows and heads of q, k, v may be strided."""
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    rows, heads, dim = q.shape
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    main, more = split_head_dim(dim)
    if main == 256:
        main = more = 128
    shape = launch_config.get_config("varlen_attention", _class(main, more, q.dtype, max(lengths, default=0)))
    table = keep_alive(tiles(tuple(lengths), shape["QUERIES"], q.device))
    if len(table):
        _varlen_kernel[(len(table), heads)](
            q, k, v, out, table, q.stride(0), k.stride(0), v.stride(0), out.stride(0), scale * math.log2(math.e),
            Q_HEAD=q.stride(1), K_HEAD=k.stride(1), V_HEAD=v.stride(1),
            DIM=dim, MAIN=main, MORE=max(more, _LEAST), TWO=more > 0, **shape,
        )  # fmt: skip
    return out


def split_head_dim(dim: int) -> tuple[int, int]:
    """Split a head size into two powers of two (or one and 0): 64 (64, 0), 72 and 80 (64, 16), 88 (64, 32), 112 (128, 0)."""
    main = max(_LEAST, 1 << dim.bit_length() - 1)
    if dim <= main:
        return main, 0
    more = max(_LEAST, triton.next_power_of_2(dim - main))
    return (2 * main, 0) if more >= main else (main, more)


def _class(main: int, more: int, dtype: torch.dtype, longest: int) -> str:
    """Return the shape class in the launch table: float32, short segments, or head sizes up to a limit."""
    if dtype == torch.float32:
        return "float32"
    if longest <= 64 and main < 128:
        return "short"
    return next(name for name, most in _CLASSES.items() if main + more <= most)
