"""Make steps of requests over a paged KV cache, for attention tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

TYPES = [torch.float32, torch.bfloat16]
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
REQUESTS = [(0, 1), (62, 1), (63, 1), (0, 64), (90, 67), (250, 3), (0, 130), (7, 1)]  # cached tokens, tokens of this step
Step = tuple[Tensor, Tensor, Tensor | None, Tensor, AttentionMetadata]


def case(
    requests: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block: int = 16,
    planes: int = 2,
    rest: float = 0.0,
) -> Step:
    """Make queries, keys and values of a step, a KV cache and its layout, from `(cached tokens, tokens of this step)` pairs.

    The cache holds earlier keys and values in blocks in random order, and `rest` elsewhere, block 0 included.
    """
    lengths = [done + rows for done, rows in requests]
    needs = [-(-n // block) for n in lengths]
    free = (1 + torch.randperm(sum(needs))).tolist()
    tables, slots = torch.zeros(len(requests), max(needs) + 1, dtype=torch.int32), []
    cache = torch.full((planes, sum(needs) + 1, block, kv_heads, dim), rest, dtype=dtype)
    for i, (done, rows) in enumerate(requests):
        tables[i, : needs[i]] = torch.tensor([free.pop() for _ in range(needs[i])], dtype=torch.int32)
        token = torch.arange(done + rows)
        where = tables[i].long()[token // block] * block + token % block
        cache.flatten(1, 2)[:, where[:done]] = torch.randn(planes, done, kv_heads, dim).to(dtype)
        slots.append(where[done:])
    starts = (0, *accumulate(rows for _, rows in requests))
    q, k, v = torch.randn(starts[-1], heads + 2 * kv_heads, dim).to(dtype).split((heads, kv_heads, kv_heads), 1)
    return q, k, v if planes == 2 else None, cache, AttentionMetadata(starts, tuple(lengths), tables, torch.cat(slots), block)


def quantized_copy(cache: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a quantised copy of the cache (None: the cache itself); non-finite rows get a non-finite scale."""
    if dtype is None:
        return cache
    heads, dim = cache.shape[3:]
    copy = torch.zeros(*cache.shape[:3], heads, kv_quant.bytes_per_head(heads, dim), dtype=dtype)
    for plane, numbers in zip(copy.flatten(1, 2), cache.flatten(1, 2), strict=True):
        kv_quant.write_quantized(numbers, plane, torch.arange(len(plane)))
    return copy


def sees_itself(meta: AttentionMetadata, spans: dict[int, tuple[int, int]]) -> AttentionMetadata:
    """Return metadata in which the tokens `[first, last)` of a request's step also attend to each other."""
    key_range = torch.cat([meta.key_ranges(i) for i in range(len(meta.seq_lens))], 1)
    for request, (first, last) in spans.items():
        start = meta.query_start_loc[request]
        before = meta.seq_lens[request] - (meta.query_start_loc[request + 1] - start)
        key_range[1, start + first : start + last] = before + last
    return replace(meta, key_range=key_range)
