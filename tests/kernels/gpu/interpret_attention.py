"""Paged attention's Triton kernels against the reference, with NaN in every slot that no row attends to."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import paged
import pytest
import torch
from paged import sees_itself
from sensorium.kernels import dispatch
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.attention import triton as attention
from sensorium.kernels.attention.query_tiles import num_splits, query_tiles_of
from sensorium.kernels.attention.reference import attend as paged_attention_reference
from sensorium.kernels.attention.reference import write_cache
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LIMITS_BY_CACHE = {
    None: LIMITS,
    **dict.fromkeys((torch.int8, torch.uint8), LIMITS | {torch.float16: 6e-3}),
}  # with a quantised cache, weights are in bfloat16
STEP = [(0, 5), (37, 1), (20, 13), (0, 1), (63, 1), (9, 2)]  # earlier tokens, rows of this step


def case(
    requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, block: int = 16, planes: int = 2
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Return strided queries and a cache with the requests' keys and values, and NaN elsewhere, block 0 included."""
    q, k, v, cache, meta = paged.case(requests, heads, kv_heads, dim, dtype, block, planes, float("nan"))
    write_cache(k, v, cache, meta)
    return q, cache, meta


def hide(cache: Tensor, meta: AttentionMetadata) -> AttentionMetadata:
    """Put NaN (or NaN scales) in slots that no row attends to, and point table entries outside windows to no memory."""
    tables, flat = meta.block_tables.clone(), cache.flatten(1, 2)
    nothing = float("nan") if cache.is_floating_point() else -1 if cache.dtype == torch.int8 else 255
    for i, length in enumerate(meta.seq_lens):
        first = int(meta.key_ranges(i)[0].min()) if meta.query_start_loc[i] < meta.query_start_loc[i + 1] else 0
        token = torch.arange(first)
        flat[:, tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size] = nothing
        tables[i, : first // meta.block_size] = 10**8
        tables[i, -(-length // meta.block_size) :] = 10**8
    return replace(meta, block_tables=tables)


def check(
    q: Tensor, cache: Tensor, meta: AttentionMetadata, scale: float, cap: float | None = None, sinks: Tensor | None = None
) -> None:
    expected = paged_attention_reference(q, cache, meta, scale, cap, sinks)
    hidden = hide(cache, meta)
    limit = LIMITS_BY_CACHE[None if cache.is_floating_point() else cache.dtype][q.dtype]
    torch.testing.assert_close(attention.attend(q, cache, hidden, scale, cap, sinks), expected, atol=limit, rtol=limit)


@pytest.fixture(params=["shipped", "tiny", "splits"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use the shipped tiles; tiny ones, so that requests have many; or tiny ones with keys split in three."""
    if request.param == "splits":
        monkeypatch.setattr(attention, "MIN_TILES", 1)
        monkeypatch.setattr(attention, "num_splits", lambda *_: 3)
    small = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    with contextlib.nullcontext() if request.param == "shipped" else launch_config.override_config("paged_attention", small):
        yield request.param


VARIANTS = [
    {},
    {"soft_cap": 1.5},
    {"window": 1},
    {"window": 23, "soft_cap": 20.0},
    {"window": 9, "spans": {0: (1, 4), 2: (2, 13), 5: (0, 2)}},
    {"spans": {0: (0, 5), 2: (0, 12)}, "soft_cap": 3.0},
    {"causal": False},
    {"planes": 1},
    {"window": 9, "sinks": True},
    {"soft_cap": 1.5, "sinks": True},
]


def sinks_of(variant: dict) -> Tensor | None:
    return torch.tensor([1.0, -2.0, 6.0]) if "sinks" in variant else None


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_rows_see(variant: dict) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[VARIANTS.index(variant) % 3]
    q, cache, meta = case(STEP, 3, 1, 32, dtype, planes=variant.get("planes", 2))
    meta = replace(meta, window=variant.get("window"), causal=variant.get("causal", True))
    if "spans" in variant:
        meta = sees_itself(meta, variant["spans"])
    check(q, cache, meta, 0.3, variant.get("soft_cap"), sinks_of(variant))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 8), (7, 1, 80), (3, 1, 128), (2, 1, 192), (20, 1, 64), (1, 1, 256)]
)
def test_heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, cache, meta = case(STEP[1:], heads, kv_heads, dim, dtype)
    check(q, cache, meta, dim**-0.5)


CODED = [one for one in VARIANTS if "planes" not in one]


@pytest.mark.parametrize("variant", [CODED[0], *(pytest.param(one, marks=pytest.mark.full) for one in CODED[1:])], ids=str)
def test_what_rows_see_in_codes(variant: dict, cut: str) -> None:
    number = VARIANTS.index(variant) + len(cut)  # each tiling gets other dtypes and formats
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    q, cache, meta = case(STEP, 3, 1, 32, dtype)
    meta = replace(meta, window=variant.get("window"), causal=variant.get("causal", True))
    if "spans" in variant:
        meta = sees_itself(meta, variant["spans"])
    check(
        q,
        paged.quantized_copy(cache, (torch.int8, torch.uint8)[number % 2]),
        meta,
        0.3,
        variant.get("soft_cap"),
        sinks_of(variant),
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 18), (7, 1, 80), (8, 2, 128)])
def test_heads_in_codes(heads: int, kv_heads: int, dim: int, codes: torch.dtype, dtype: torch.dtype) -> None:
    q, cache, meta = case(STEP[1:3], heads, kv_heads, dim, dtype)
    check(q, paged.quantized_copy(cache, codes), meta, dim**-0.5)


@pytest.mark.parametrize("heads", [4, 18])
def test_latent_rows(heads: int) -> None:
    """MLA: rows of 512 and 64 numbers are both keys and values. 18 heads are more than a tile has rows."""
    q, cache, meta = case([(0, 3), (20, 1)], heads, 1, 576, torch.bfloat16, planes=1)
    check(q, cache, meta, 0.07)
    with launch_config.override_config("paged_attention", {"BLOCK_M": 16, "BLOCK_N": 16}):
        check(q, cache, meta, 0.07)


@pytest.mark.parametrize("block", [1, 4, 48, 64])
def test_blocks_of_any_size(block: int) -> None:
    q, cache, meta = case(STEP, 2, 1, 16, torch.float32, block)
    check(q, cache, replace(meta, window=17), 0.4)


def test_decode_rows_alone_in_parts() -> None:
    """Decode rows alone need no tile table. The interpreter counts as a small GPU, so these rows are split."""
    requests = [(300, 1), (2, 1), (140, 1)]
    q, cache, meta = case(requests, 2, 1, 16, torch.float32)
    with launch_config.override_config("paged_attention", {"BLOCK_M": 16, "BLOCK_N": 16}):
        check(q, cache, meta, 0.4)
        check(q, cache, replace(meta, window=100), 0.4)
    narrow, wide = query_tiles_of(meta, 8, 64)
    assert narrow.table is None
    assert (narrow.count, narrow.longest, wide.count) == (3, 301, 0)


def test_nothing_is_launched_by_what_tensors_hold() -> None:
    """A captured step launches for the longest possible requests; lengths are written later, 0 means no request."""
    q, cache, meta = case([(40, 1), (0, 1), (77, 1)], 4, 2, 16, torch.float32)
    recorded = replace(meta, seq_lens=(128, 128, 128))
    lengths = recorded.device_starts_and_lens[1]
    lengths.copy_(torch.tensor([41, 0, 78]))
    out = attention.attend(q, cache, recorded, 0.4)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    expected = paged_attention_reference(q, cache, meta, 0.4)
    torch.testing.assert_close(out[::2], expected[::2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's matmul, used by the interpreter, sums in an order that depends on the row's place; replace it."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a.astype(dtype)[:, :, None] * b.astype(dtype)).sum(1))
    q, cache, meta = case([(0, 70), (30, 1)], 3, 1, 16, dtype)
    meta = replace(meta, batch_invariant=True, window=window)
    whole = attention.attend(q, cache, meta, 0.4, 5.0)
    table = meta.block_tables[:1]
    for start, stop in ((0, 1), (1, 20), (20, 69), (69, 70)):
        part = AttentionMetadata((0, stop - start), (stop,), table, meta.slot_mapping, 16, batch_invariant=True, window=window)
        assert torch.equal(attention.attend(q[start:stop], cache, part, 0.4, 5.0), whole[start:stop])
    torch.testing.assert_close(
        whole, paged_attention_reference(q, cache, meta, 0.4, 5.0), atol=LIMITS[dtype], rtol=LIMITS[dtype]
    )


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("planes", [1, 2])
def test_write(planes: int, dtype: torch.dtype) -> None:
    """Strided rows go to their slots and nowhere else; a row with a negative slot is skipped."""
    _, cache, meta = case(STEP, 1, 3, 24, dtype, planes=planes)
    cache, both = torch.randn(cache.shape).to(dtype), torch.randn(meta.num_rows, 7, 24).to(dtype)
    k, v = both[:, 1:4], both[:, 4:]
    expected = cache.clone()
    write_cache(k, v, expected, meta)
    expected.flatten(1, 2)[:, meta.slot_mapping[3]] = cache.flatten(1, 2)[:, meta.slot_mapping[3]]
    meta.slot_mapping[3] = -1
    attention.write_cache(k, v if planes == 2 else None, cache, meta)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("codes", LIMITS_BY_CACHE, ids=str)
def test_chosen_by_name(codes: torch.dtype | None) -> None:
    """Write and attend in one call. The cache then holds exactly the keys and values of this step."""
    q, plain, meta = case([(0, 20), (0, 1)], 4, 2, 16, torch.float32)
    k, v = plain.flatten(1, 2)[:, meta.slot_mapping].unbind()
    cache = paged.quantized_copy(plain, codes)
    expected = paged_attention_reference(q, cache, meta, 0.3)
    fresh = paged.quantized_copy(torch.full_like(plain, float("nan")), codes)
    with dispatch.use_backends("attention=triton"):
        out = paged_attention(q, k, v, fresh, meta, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    found, wanted = (flat[:, meta.slot_mapping] for flat in (fresh.flatten(1, 2), cache.flatten(1, 2)))
    assert torch.equal(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(80))
def test_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed).choice
    requests = [(pick([0, 0, 1, 15, 16, 17, 50, 90]), pick([1, 1, 1, 2, 3, 16, 17, 33])) for _ in range(pick([1, 2, 4]))]
    heads, kv_heads, dim = pick([(1, 1, 16), (4, 2, 24), (7, 1, 40), (3, 3, 64), (18, 1, 48), (2, 1, 136), (2, 1, 576)])
    dtype, planes = pick(list(LIMITS)), pick([1, 2])
    q, cache, meta = case(requests, heads, kv_heads, dim, dtype, pick([1, 8, 16, 16, 32, 96]), planes)
    meta = replace(meta, causal=pick([True, True, False]))
    if meta.causal:
        meta = replace(meta, window=pick([None, None, 1, 16, 31]), batch_invariant=pick([False, False, True]))
        spans = {i: (rows // 3, rows) for i, (_, rows) in enumerate(requests) if rows > 2}
        meta = sees_itself(meta, spans) if spans and pick([True, False]) else meta
    cache = paged.quantized_copy(cache, pick([None, None, torch.int8, torch.uint8])) if planes == 2 else cache
    if pick([True, False]):
        monkeypatch.setattr(attention, "MIN_TILES", 1)
        monkeypatch.setattr(attention, "num_splits", lambda *_: 1 + seed % 5)
    config = {"BLOCK_M": pick([16, 32]), "BLOCK_N": pick([16, 32]), "num_warps": 4, "num_stages": 1}
    with launch_config.override_config("paged_attention", config) if pick([True, False]) else contextlib.nullcontext():
        check(q, cache, meta, dim**-0.5 * pick([0.3, 1.0, 3.0]), pick([None, None, 0.5, 30.0]))


def test_splits_keep_a_card_busy() -> None:
    assert num_splits(4.0, 100, 264) == 55  # 220 of 264 slots, all at once
    assert num_splits(4.0, 8, 264) == 7
    assert num_splits(512.0, 100, 264) == 1
    assert num_splits(300.0, 100, 264) == 3
    assert num_splits(3.0, 0, 264) == 1
