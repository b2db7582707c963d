"""Launches of paged attention at the shapes of 7B decoders, and at shapes that take other branches of the kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.attention import triton as attention
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

HOT = {"_attend_kernel", "_combine_splits_kernel", "_write_kernel"}
DECODE = [(4095, 1)] * 8
MIXED = [(0, 4096), *DECODE]
MANY = [(0, 4096)] * 8


def step(requests: list[tuple[int, int]], **more: object) -> AttentionMetadata:
    """Return metadata of requests given as `(earlier tokens, rows)`. The kernels are compiled only, so no cache is needed."""
    lengths = tuple(done + rows for done, rows in requests)
    starts = (0, *accumulate(rows for _, rows in requests))
    tables = torch.zeros(len(requests), -(-max(lengths) // 16), dtype=torch.int32)
    return replace(AttentionMetadata(starts, lengths, tables, torch.zeros(starts[-1], dtype=torch.int64), 16), **more)


def attend(
    meta: AttentionMetadata,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    planes: int = 2,
    cap: float | None = None,
    codes: torch.dtype | None = None,
    sinks: bool = False,
) -> None:
    """Write keys and values, then attend. `heads`: query heads, key heads and their size."""
    q_heads, kv_heads, dim = heads
    width = dim if codes is None else kv_quant.bytes_per_head(kv_heads, dim)
    cache = torch.empty(planes, 4, meta.block_size, kv_heads, width, dtype=codes or dtype)
    k = torch.empty(meta.num_rows, kv_heads, dim, dtype=dtype)
    attention.write_cache(k, k if planes == 2 else None, cache, meta)
    scores = torch.empty(q_heads) if sinks else None
    attention.attend(torch.empty(meta.num_rows, q_heads, dim, dtype=dtype), cache, meta, dim**-0.5, cap, scores)


def key_range(meta: AttentionMetadata) -> Tensor:
    return torch.cat([meta.key_ranges(i) for i in range(len(meta.seq_lens))], 1)


def launches() -> None:
    """Launch all variants; for AMD, whose compiler is ten times slower, only what a server meets first."""
    bf16 = torch.bfloat16
    attend(step(MIXED), (28, 4, 128), bf16)
    attend(step(DECODE, window=1024), (14, 2, 64), bf16)
    attend(step(MIXED, window=128), (64, 8, 64), bf16, sinks=True)
    if not launch_config.gpu_info().arch.startswith("sm_"):
        return
    attend(step(MIXED), (28, 4, 128), torch.float16)
    attend(step(MIXED), (14, 2, 64), bf16)
    attend(step(DECODE), (28, 4, 128), bf16)
    attend(step([(4095, 1)] * 64), (32, 8, 128), bf16)
    attend(step(MANY, causal=False), (32, 8, 128), bf16)
    attend(step(MIXED, window=1024), (8, 4, 256), bf16)
    meta = step(MIXED, window=1024)
    attend(replace(meta, key_range=key_range(meta)), (8, 4, 256), bf16, cap=50.0)
    attend(step(MIXED), (32, 8, 80), bf16)
    attend(step(MIXED), (16, 1, 576), bf16, planes=1)
    attend(step(DECODE), (128, 1, 576), bf16, planes=1)
    attend(step(DECODE, causal=False), (20, 20, 64), torch.float16)
    attend(step(MIXED, batch_invariant=True), (28, 4, 128), bf16)
    attend(step(MIXED), (14, 2, 64), torch.float32)
    for codes in kv_quant.CACHE_DTYPES.values():
        attend(step(MIXED), (28, 4, 128), bf16, codes=codes)
        attend(step(DECODE, window=1024), (14, 2, 64), torch.float16, codes=codes)
        attend(step(MIXED), (8, 4, 256), bf16, cap=50.0, codes=codes)
