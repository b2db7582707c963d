"""Quantised KV values as Triton kernels write and read them, against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from paged import quantized_copy
from sensorium.kernels import kv_quant
from sensorium.kernels.kv_quant.triton import widen, write_quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 8), (2, 8, 18), (6, 3, 18), (4, 5, 80), (3, 2, 160)])
def test_write(rows: int, heads: int, dim: int, codes: torch.dtype, dtype: torch.dtype) -> None:
    """Strided rows of all magnitudes go to their slots and nowhere else; a row with a negative slot is skipped."""
    both = (torch.randn(rows, 2 * heads + 1, dim) * torch.logspace(-7, 2, dim)[torch.randperm(dim)]).to(dtype)
    both[0, 0] = 0.0
    k, v = both[:, :heads], both[:, heads:-1]
    cache = quantized_copy(torch.randn(2, 3, 4, heads, dim), codes)
    slots = torch.randperm(12)[:rows]
    expected = cache.clone()
    for plane, side in zip(expected.flatten(1, 2), (k, v), strict=True):
        kv_quant.write_quantized(side[: rows - 1 or 1], plane, slots[: rows - 1 or 1])
    if rows > 1:
        slots[-1] = -1
    write_quantized(k, v, cache, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_hidden(broken: float, codes: torch.dtype) -> None:
    k, v = torch.randn(2, 2, 2, 16).unbind()
    k[0, 1, 3] = broken
    cache = quantized_copy(torch.zeros(2, 1, 4, 2, 16), codes)
    write_quantized(k, v, cache, torch.tensor([0, 1]))
    scales = kv_quant.split_scales(cache.flatten(1, 2), 16)[1]
    assert not scales[0, 0, 1].isfinite()
    assert int(scales.isfinite().sum()) == scales.numel() - 1


@triton.jit
def _widen_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, widen(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
def test_every_code(codes: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8)
    expected = every.view(torch.int8 if codes == torch.int8 else torch.float8_e4m3fn).to(dtype)
    out = torch.empty(256, dtype=dtype)
    _widen_kernel[(1,)](every.view(codes), out, BLOCK=256)
    assert torch.equal(out[expected.isfinite()], expected[expected.isfinite()])
