"""Launches of paged attention at the shapes of 7B decoders, and of others that take another way through the kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from sensorium.kernels.gpu import attention
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

HOT = {"_attend_kernel", "_join_kernel", "_write_kernel"}
DECODE = [(4095, 1)] * 8
MIXED = [(0, 4096), *DECODE]
MANY = [(0, 4096)] * 8


def step(requests: list[tuple[int, int]], **more: object) -> AttentionMetadata:
    """Of `(earlier tokens, rows)` each; blocks stand in no cache, nothing runs."""
    lengths = tuple(done + rows for done, rows in requests)
    starts = (0, *accumulate(rows for _, rows in requests))
    tables = torch.zeros(len(requests), -(-max(lengths) // 16), dtype=torch.int32)
    return replace(AttentionMetadata(starts, lengths, tables, torch.zeros(starts[-1], dtype=torch.int64), 16), **more)


def attend(meta: AttentionMetadata, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, planes: int = 2, cap: float | None = None) -> None:
    cache = torch.empty(planes, 4, meta.block_size, kv_heads, dim, dtype=dtype)
    k = torch.empty(meta.num_rows, kv_heads, dim, dtype=dtype)
    attention.write(k, k if planes == 2 else None, cache, meta)
    attention.attend(torch.empty(meta.num_rows, heads, dim, dtype=dtype), cache, meta, dim**-0.5, cap)


def seen(meta: AttentionMetadata) -> Tensor:
    return torch.cat([meta.ranges(i) for i in range(len(meta.seq_lens))], 1)


def launches() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        attend(step(MIXED), 28, 4, 128, dtype)
        attend(step(MIXED), 14, 2, 64, dtype)
    attend(step(MANY), 28, 4, 128, torch.bfloat16)
