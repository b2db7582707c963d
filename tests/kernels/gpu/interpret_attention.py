"""Paged attention's Triton kernels against the reference, with NaN in every slot that no row sees."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from sensorium.kernels.attention import paged_attention_reference
from sensorium.kernels.gpu import attention, tune
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
STEP = [(0, 5), (37, 1), (20, 13), (0, 1), (63, 1), (9, 2)]  # earlier tokens, rows of this step


def case(
    requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, block: int = 16, planes: int = 2
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Queries that lie apart, and a cache that holds what the requests see and NaN elsewhere, block 0 included."""
    lengths = [done + rows for done, rows in requests]
    needs = [-(-n // block) for n in lengths]
    free = (1 + torch.randperm(sum(needs))).tolist()
    tables, slots = torch.zeros(len(requests), max(needs) + 1, dtype=torch.int32), []
    cache = torch.full((planes, sum(needs) + 1, block, kv_heads, dim), float("nan"), dtype=dtype)
    for i, (done, rows) in enumerate(requests):
        tables[i, : needs[i]] = torch.tensor([free.pop() for _ in range(needs[i])], dtype=torch.int32)
        token = torch.arange(done + rows)
        where = tables[i].long()[token // block] * block + token % block
        cache.flatten(1, 2)[:, where] = torch.randn(planes, done + rows, kv_heads, dim).to(dtype)
        slots.append(where[done:])
    starts = (0, *accumulate(rows for _, rows in requests))
    q = torch.randn(starts[-1], heads + 2 * kv_heads, dim).to(dtype)[:, :heads]
    return q, cache, AttentionMetadata(starts, tuple(lengths), tables, torch.cat(slots), block)


def test_first() -> None:
    q, cache, meta = case(STEP, 4, 2, 64, torch.float32)
    out = attention.attend(q, cache, meta, 0.2)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, 0.2), atol=1e-5, rtol=1e-5)
