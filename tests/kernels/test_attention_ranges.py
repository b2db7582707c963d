"""Attention to a range of keys: sliding windows, bidirectional spans, soft caps, and keys that are also values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import LIMITS, REQUESTS, TYPES, case, sees_itself
from sensorium.kernels import native
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.attention.reference import attend as paged_attention_reference
from sensorium.kernels.metadata import AttentionMetadata

needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SENSORIUM_KERNELS", f"attention={request.param}")
    return str(request.param)


VARIANTS = [
    {"window": 1},
    {"window": 5},
    {"window": 64, "soft_cap": 3.0},
    {"window": 100, "spans": {3: (2, 60), 4: (0, 67), 6: (5, 125)}},
    {"spans": {3: (0, 64), 4: (60, 67), 5: (0, 2), 6: (0, 130)}, "soft_cap": 20.0},
    {"planes": 1},
    {"planes": 1, "window": 70, "soft_cap": 5.0},
    {"soft_cap": 1.5},
    {"sinks": True},
    {"window": 70, "soft_cap": 3.0, "sinks": True},
]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 80), (2, 2, 256), (3, 1, 576)])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equal_to_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, variant: dict) -> None:
    q, k, v, cache, meta = case(REQUESTS, heads, kv_heads, dim, dtype, planes=variant.get("planes", 2))
    meta = replace(meta, window=variant.get("window"))
    if "spans" in variant:
        meta = sees_itself(meta, variant["spans"])
    scale, cap = 2 * dim**-0.5, variant.get("soft_cap")
    sinks = torch.randn(heads) * 3 if "sinks" in variant else None
    out = paged_attention(q, k, v, cache, meta, scale, cap, sinks)
    torch.testing.assert_close(
        out, paged_attention_reference(q, cache, meta, scale, cap, sinks), atol=LIMITS[dtype], rtol=LIMITS[dtype]
    )


def test_the_reference_against_a_mask() -> None:
    q, k, v, cache, meta = case([(0, 12)], 2, 2, 8, torch.float64)
    meta = sees_itself(replace(meta, window=4), {0: (3, 9)})
    at = torch.arange(12)
    mask = (at[None] <= at[:, None]) | ((at[None] < 9) & (at[None] >= 3) & (at[:, None] >= 3) & (at[:, None] < 9))
    mask &= at[None] > at[:, None] - 4  # a window also cuts bidirectional spans
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.4 / 2).tanh() * 2
    scores = scores.masked_fill(~mask, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    cache.flatten(1, 2)[0][meta.slot_mapping], cache.flatten(1, 2)[1][meta.slot_mapping] = k, v
    torch.testing.assert_close(paged_attention_reference(q, cache, meta, 0.4, 2.0), expected, atol=1e-6, rtol=1e-6)
    sinks = torch.tensor([1.0, -2.0])
    shares = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks[:, None, None].exp())
    found = paged_attention_reference(q, cache, meta, 0.4, 2.0, sinks)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", shares, v), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_before_a_window_are_not_read(dtype: torch.dtype) -> None:
    q, k, v, cache, meta = case([(150, 1), (40, 30), (290, 2)], 4, 2, 32, dtype)
    meta = replace(meta, window=20)
    whole = paged_attention(q, k, v, cache.clone(), meta, 0.2)
    tables = meta.block_tables.clone()
    for i, first in enumerate((131 // 16, 21 // 16, 271 // 16)):
        cache[:, tables[i, :first].long()] = float("nan")
        tables[i, :first] = 0
    cache[:, 0] = float("nan")
    assert torch.equal(paged_attention(q, k, v, cache, replace(meta, block_tables=tables), 0.2), whole)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 30, 77])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    """A row's bits do not depend on where the prompt is cut (outside the bidirectional span) or on other requests."""
    length, item = 210, (60, 140)
    q, k, v, cache, meta = case([(0, length)], 6, 2, 64, dtype)
    whole = paged_attention(q, k, v, cache, sees_itself(replace(meta, window=window), {0: item}), 0.2, cap)
    for cuts in ((60, 140), (1, 30, 59, 150), (17, 58, 141, *range(142, length))):
        _, _, _, other, other_meta = case([(9, 30), (0, length), (33, 1)], 6, 2, 64, dtype, block=8)
        parts = []
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            slots = other_meta.slot_mapping[30:-1][start:stop]
            step = AttentionMetadata((0, 1, 1 + stop - start), (9, stop), other_meta.block_tables[:2], slots, 8, window=window)
            queries = torch.cat((q[:1], q[start:stop]))
            mate = torch.tensor([int(other_meta.block_tables[0, 1]) * 8])  # the ninth token of the other request
            step = replace(step, slot_mapping=torch.cat((mate, slots)))
            if start <= item[0] < stop:
                step = sees_itself(step, {1: (item[0] - start, item[1] - start)})
            keys, values = (torch.cat((side[:1], side[start:stop])) for side in (k, v))
            parts.append(paged_attention(queries, keys, values, other, step, 0.2, cap)[1:])
        assert torch.equal(torch.cat(parts), whole)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_heads_that_are_read_together(dtype: torch.dtype) -> None:
    """With enough requests for all threads, a thread reads the key heads of a cache row together: the bits stay the same."""
    lengths = [3, 64, 65, 150, 17, 128, 1, 90, 33, 70]
    q, k, v, cache, meta = case([(length, 1) for length in lengths], 10, 5, 40, dtype)
    together = paged_attention(q, k, v, cache, meta, 0.2)
    for i, length in enumerate(lengths):
        alone = AttentionMetadata(
            (0, 1), (length + 1,), meta.block_tables[i : i + 1], meta.slot_mapping[i : i + 1], meta.block_size
        )
        row = slice(i, i + 1)
        assert torch.equal(paged_attention(q[row], k[row], v[row], cache, alone, 0.2), together[row])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together, paged_attention_reference(q, cache, meta, 0.2), atol=limit, rtol=limit)
