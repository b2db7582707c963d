"""Tests of the test rig: GPU rounding of bfloat16 and fp8; values a kernel forgets or writes out of bounds show up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted import GUARD, guarded, margins_are_whole
from torch import Tensor

SIZE = 256


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, sum_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + SIZE + at, x * 2.0 - y)
    tl.store(out_ptr + 2 * SIZE + at, tl.where(x > y, x, -y))
    tl.store(out_ptr + 3 * SIZE + at, tl.maximum(x, y))
    tl.store(out_ptr + 4 * SIZE + at, (x.to(tl.float32) * 0.3).to(x.dtype))
    tl.store(sum_ptr, tl.sum(x.to(tl.float32)))
    tl.store(sum_ptr + 1, tl.max(x, 0).to(tl.float32))


@triton.jit
def _product_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def _part_kernel(out_ptr, first, SIZE: tl.constexpr):
    tl.store(out_ptr + first + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once_an_operation(dtype: torch.dtype) -> None:
    x, y = torch.randn(SIZE).to(dtype), torch.randn(SIZE).to(dtype)
    out, both = torch.empty(5, SIZE, dtype=dtype), torch.empty(2)
    _arithmetic_kernel[(1,)](x, y, out, both, SIZE=SIZE)
    wanted = torch.stack((x + y, x * 2.0 - y, torch.where(x > y, x, -y), torch.maximum(x, y), (x.float() * 0.3).to(dtype)))
    assert torch.equal(out, wanted)
    torch.testing.assert_close(both, torch.stack((x.float().sum(), x.float().max())))


def test_products_of_bfloat16_are_exact() -> None:
    x, y = torch.randn(2, 32, 32).to(torch.bfloat16)
    out = torch.empty(32, 32)
    _product_kernel[(1,)](x, y, out, SIZE=32)
    torch.testing.assert_close(out, x.float() @ y.float())


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rounds_to_even_and_saturates(source: torch.dtype, target: torch.dtype) -> None:
    most = torch.finfo(target).max
    x = (torch.randn(SIZE) * torch.tensor([1e-3, 1.0, 100.0, 1e4])[torch.randint(4, (SIZE,))]).to(source)
    out = torch.empty(SIZE, dtype=target)
    _cast_kernel[(1,)](x, out, SIZE=SIZE)
    assert torch.equal(out.view(torch.uint8), x.float().clamp(-most, most).to(target).view(torch.uint8))


def test_what_was_not_written_shows() -> None:
    out = torch.empty(2 * SIZE)
    _part_kernel[(1,)](out, 0, SIZE=SIZE)
    assert not out[:SIZE].any()
    assert out[SIZE:].isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert (torch.empty_like(torch.ones(3, dtype=torch.int64)) == 2**63 - 1).all()
    assert torch.ones(3).new_empty(4).isnan().all()


@pytest.mark.parametrize(("first", "whole"), [(0, True), (GUARD // 2, False), (-1, False)])
def test_what_was_written_beside_the_output_shows(first: int, whole: bool) -> None:
    held: list[tuple[Tensor, Tensor]] = []
    make: Any = guarded(torch.zeros, held)
    _part_kernel[(1,)](make(SIZE), first, SIZE=SIZE)
    assert margins_are_whole(held) == whole
