"""Quantised KV caches: rounding errors of a row, and attention over it, in C++ and in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cpu import running_with
from paged import LIMITS, REQUESTS, TYPES, case, quantized_copy, sees_itself
from sensorium.kernels import kv_quant, native
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.attention.reference import attend as paged_attention_reference
from sensorium.kernels.attention.reference import write_cache
from sensorium.kernels.metadata import AttentionMetadata
from torch import Tensor

CODES = [torch.int8, torch.uint8]
needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SENSORIUM_KERNELS", f"attention={request.param}")
    return str(request.param)


@pytest.fixture(params=["base", "avx2", "avx512", "avx512_bf16", "amx"])
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with each instruction set that this CPU has."""
    with running_with(request.param):
        yield


def off(x: Tensor, codes: torch.dtype) -> Tensor:
    """Return the largest error per number: half a step. e4m3 has 8 steps per power of two from 2^-6 on."""
    scale = x.abs().amax(-1, keepdim=True).float() / kv_quant.MAX_VALUES[codes]
    if codes == torch.int8:
        return scale.expand(x.shape) * 0.5 * (1 + 1e-5)
    return torch.maximum(x.float().abs() / 16, scale * 2**-10) * (1 + 1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8, 12, 16, 20])
@pytest.mark.parametrize("dim", [8, 18, 64, 80, 128])
def test_rows_lie_in_memory_side_by_side(kv_heads: int, dim: int) -> None:
    width = kv_quant.bytes_per_head(kv_heads, dim)
    assert kv_heads * width % 16 == 0
    assert width % 4 == 0, "all of a cache can be seen as scales, with the heads apart"
    assert dim + 4 <= width <= dim + 4 + 15
    cache = torch.zeros(2, 3, 4, kv_heads, width, dtype=torch.int8)
    codes, scales = kv_quant.split_scales(cache, dim)
    codes.fill_(1)
    scales.fill_(torch.tensor([0x02020202], dtype=torch.int32).view(torch.float32).item())
    assert int((cache == 1).sum()) == codes.numel(), "scales and codes lie apart"
    assert int((cache == 2).sum()) == 4 * scales.numel()
    assert cache.flatten(3)[..., : kv_heads * dim].eq(1).all(), "codes come first"


@pytest.mark.parametrize("codes", CODES)
def test_numbers_are_off_by_half_a_step(codes: torch.dtype) -> None:
    x = torch.randn(200, 3, 48) * torch.logspace(-6, 3, 48)
    x[0], x[1, 0, 5:] = 0.0, 0.0
    cache = torch.zeros(200, 3, kv_quant.bytes_per_head(3, 48), dtype=codes)
    kv_quant.write_quantized(x, cache, torch.arange(200))
    found = kv_quant.dequantize(cache, 48)
    assert ((found - x).abs() <= off(x, codes)).all()
    assert torch.equal(found[0], x[0])
    largest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codes", CODES)
def test_a_row_depends_on_no_other(codes: torch.dtype) -> None:
    x = torch.randn(9, 2, 16)
    whole = kv_quant.quantize(x, codes)
    assert all(torch.equal(part[4:5], one) for part, one in zip(whole, kv_quant.quantize(x[4:5], codes), strict=True))


@needs_library
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 80), (3, 3, 18)])
def test_equal_in_every_instruction_set(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    """C++ writes the same bits as torch, and attends like the reference."""
    q, k, v, cache, meta = case([(0, 3), (70, 66), (18, 1)], heads, kv_heads, dim, dtype)
    k[0] *= torch.logspace(-6, 3, dim).to(dtype)
    cache = quantized_copy(cache, codes)
    expected = cache.clone()
    write_cache(k, v, expected, meta)
    out = paged_attention(q, k, v, cache, meta, dim**-0.5)
    assert torch.equal(cache, expected)
    reference = paged_attention_reference(q, cache, meta, dim**-0.5)
    torch.testing.assert_close(out, reference, atol=LIMITS[dtype], rtol=LIMITS[dtype])


VARIANTS = [
    {},
    {"causal": False},
    {"window": 5},
    {"window": 64, "soft_cap": 3.0},
    {"window": 100, "spans": {3: (2, 60), 4: (0, 67), 6: (5, 125)}},
    {"spans": {3: (0, 64), 5: (0, 2)}, "soft_cap": 20.0},
    {"window": 40, "soft_cap": 3.0, "sinks": True},
]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equal_to_the_reference(variant: dict, dtype: torch.dtype, codes: torch.dtype) -> None:
    """Unused slots hold NaN scales. float16 runs in torch with both backends."""
    q, k, v, cache, meta = case(REQUESTS, 6, 2, 32, dtype)
    meta = replace(meta, window=variant.get("window"), causal=variant.get("causal", True))
    meta = sees_itself(meta, variant["spans"]) if "spans" in variant else meta
    cache = quantized_copy(cache, codes)
    sinks = torch.randn(6) if "sinks" in variant else None
    out = paged_attention(q, k, v, cache, meta, 0.3, variant.get("soft_cap"), sinks)
    expected = paged_attention_reference(q, cache, meta, 0.3, variant.get("soft_cap"), sinks)
    limit = LIMITS.get(dtype, 3e-3)
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("codes", CODES)
def test_as_far_off_as_its_numbers(codes: torch.dtype) -> None:
    """The error stays within the bound of quantisation: scores off by d change a weight by a factor of e^2d at most."""
    q, k, v, cache, meta = case([(0, 60), (33, 1)], 4, 2, 32, torch.float32)
    rounded = quantized_copy(cache, codes)
    write_cache(k, v, rounded, meta)
    write_cache(k, v, cache, meta)
    found, exact = (paged_attention_reference(q, one, meta, 0.2) for one in (rounded, cache))
    keys, values = cache[0].flatten(0, 1), cache[1].flatten(0, 1)
    scores = torch.einsum("qhd,khd->qhk", q.abs(), off(keys, codes).repeat_interleave(2, 1)).amax(-1) * 0.2
    bound = (torch.exp(2 * scores) - 1) * values.abs().amax() + off(values, codes).amax()
    assert ((found - exact).abs() <= bound[..., None]).all()
    assert float((found - exact).norm() / exact.norm()) < {torch.int8: 0.01, torch.uint8: 0.06}[codes]


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("window", [None, 30])
def test_a_row_is_the_same_in_every_batch(window: int | None, codes: torch.dtype, dtype: torch.dtype) -> None:
    """A row's bits do not depend on chunking or on other requests, since its keys always come from the cache."""
    length = 150
    q, k, v, cache, meta = case([(0, length)], 6, 2, 64, dtype)
    whole = paged_attention(q, k, v, quantized_copy(cache, codes), replace(meta, window=window), 0.2)
    for cuts in ((60, 140), (1, 30, 59), (17, 58, 141, *range(142, length))):
        *_, other, both = case([(9, 30), (0, length)], 6, 2, 64, dtype, block=8)
        other, parts = quantized_copy(other, codes), []
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            slots = torch.cat((both.slot_mapping[:1], both.slot_mapping[30:][start:stop]))
            step = AttentionMetadata((0, 1, 1 + stop - start), (10, stop), both.block_tables, slots, 8, window=window)
            rows = [torch.cat((side[:1], side[start:stop])) for side in (q, k, v)]
            parts.append(paged_attention(*rows, other, step, 0.2)[1:])
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_is_told_and_stays_with_its_request(side: int, codes: torch.dtype) -> None:
    q, k, v, cache, meta = case([(20, 1), (30, 1)], 2, 2, 16, torch.float32)
    (k, v)[side][0, 1, 3] = float("nan")
    out = paged_attention(q, k, v, quantized_copy(cache, codes), meta, 0.2)
    assert not out[0, 1].isfinite().any()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()
