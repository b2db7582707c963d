"""Paged and packed attention against their references."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.attention.reference import attend as paged_attention_reference
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.varlen import varlen_attention
from sensorium.kernels.varlen.reference import varlen_attention as varlen_attention_reference

BLOCK = 4


def paged_case(requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int):
    """Make a step of requests `(earlier tokens, rows of this step)` on blocks in random order; the cache holds noise."""
    gen = torch.Generator().manual_seed(seed)
    lengths = [done + rows for done, rows in requests]
    needs = [-(-n // BLOCK) for n in lengths]
    free = torch.randperm(sum(needs) + 3, generator=gen).tolist()
    tables = torch.zeros(len(requests), max(needs), dtype=torch.int32)
    slots, starts = [], [0]
    for i, (done, rows) in enumerate(requests):
        tables[i, : needs[i]] = torch.tensor([free.pop() for _ in range(needs[i])], dtype=torch.int32)
        token = torch.arange(done, done + rows)
        slots.append(tables[i].long()[token // BLOCK] * BLOCK + token % BLOCK)
        starts.append(starts[-1] + rows)
    cache = torch.randn(2, sum(needs) + 3, BLOCK, kv_heads, dim, generator=gen).to(dtype)
    q, k, v = (torch.randn(starts[-1], n, dim, generator=gen).to(dtype) for n in (heads, kv_heads, kv_heads))
    return q, k, v, cache, AttentionMetadata(tuple(starts), tuple(lengths), tables, torch.cat(slots), BLOCK)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 9)), min_size=1, max_size=5),
    shape=st.sampled_from([(4, 4, 8), (4, 2, 16), (6, 1, 32)]),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_reference(requests: list[tuple[int, int]], shape: tuple[int, int, int], seed: int) -> None:
    q, k, v, cache, meta = paged_case(requests, *shape, torch.float32, seed)
    out = paged_attention(q, k, v, cache, meta, 0.3)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, 0.3), atol=1e-5, rtol=1e-5)


def test_only_decode_rows_and_writes() -> None:
    """A batch of decode rows has its own path; keys and values go to their slots and nowhere else."""
    q, k, v, cache, meta = paged_case([(7, 1), (0, 1), (12, 1)], 4, 2, 8, torch.float32, 3)
    before = cache.clone()
    out = paged_attention(q, k, v, cache, meta, 0.3)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, 0.3), atol=1e-5, rtol=1e-5)
    flat, old = cache.flatten(1, 2), before.flatten(1, 2)
    assert torch.equal(flat[0][meta.slot_mapping], k)
    assert torch.equal(flat[1][meta.slot_mapping], v)
    rest = torch.ones(flat.shape[1], dtype=torch.bool)
    rest[meta.slot_mapping] = False
    assert torch.equal(flat[:, rest], old[:, rest])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, limit: float) -> None:
    q, k, v, cache, meta = paged_case([(5, 3), (9, 1), (0, 6)], 4, 2, 16, dtype, 1)
    out = paged_attention(q, k, v, cache, meta, 0.25)
    assert out.dtype == dtype
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, 0.25), atol=limit, rtol=limit)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_varlen_equals_reference(lengths: list[int], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), 3, 8, generator=gen) for _ in range(3))
    out = varlen_attention(q, k, v, lengths, 0.4)
    torch.testing.assert_close(out, varlen_attention_reference(q, k, v, lengths, 0.4), atol=1e-5, rtol=1e-5)


def test_varlen_segments_are_blind_to_each_other() -> None:
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    out = varlen_attention(q, k, v, [4, 5], 0.4)
    k[4:], v[4:] = 7.0, -3.0
    assert torch.equal(varlen_attention(q, k, v, [4, 5], 0.4)[:4], out[:4])


def test_a_long_context_does_not_widen_short_ones() -> None:
    requests = [(60, 1), *[(i % 3, 1) for i in range(9)], (5, 2)]
    q, k, v, cache, meta = paged_case(requests, 4, 2, 8, torch.float32, 5)
    assert sum(len(group.blocks) for group in meta.decode_groups) <= 2 * sum(-(-n // BLOCK) for n in meta.seq_lens)
    assert len(meta.decode_groups) > 1
    out = paged_attention(q, k, v, cache, meta, 0.3)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, 0.3), atol=1e-5, rtol=1e-5)


AT_THE_EDGE = """
import ctypes, mmap, torch
from sensorium.kernels.varlen import varlen_attention

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
pages = mmap.mmap(-1, 3 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
assert libc.mprotect(ctypes.c_void_p(start + 2 * page), page, 0) == 0
for dtype in (torch.float32, torch.bfloat16):
    for dim in (8, 16, 22, 72):
        count = 5 * 2 * dim
        edge = torch.frombuffer(pages, dtype=dtype, count=count, offset=2 * page - count * dtype.itemsize).view(5, 2, dim)
        edge.fill_(1)
        inside = edge.clone()
        for q, k, v in ((edge, inside, inside), (inside, edge, inside), (inside, inside, edge)):
            torch.testing.assert_close(varlen_attention(q, k, v, [5], 0.2), inside)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_is_read_beyond_the_end() -> None:
    """Rows end at a protected page; some head widths do not fill a vector."""
    done = subprocess.run([sys.executable, "-c", AT_THE_EDGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
