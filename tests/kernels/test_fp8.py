"""Weights as 8-bit floats: rounding, products, and rows that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.linear import linear, pack
from sensorium.kernels.linear.eight_bit import Fp8Weight
from sensorium.kernels.linear.fp8 import fp8_linear, pack_fp8, quantize_rows_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=gen).to(dtype) for shape in ((7, 96), (300, 96), (300,)))
    packed = pack(weight, bias, "fp8")
    assert isinstance(packed, Fp8Weight)
    wide = packed.weight.double() * packed.scale.double()[:, None]
    assert ((wide - weight).abs() <= weight.abs() / 16 + packed.scale[:, None] * 2**-10).all()  # three mantissa bits
    wanted = (x.double() @ wide.T + bias).to(dtype)
    torch.testing.assert_close(linear(x, packed), wanted)


def test_rows_of_zeros_and_the_largest() -> None:
    x = torch.tensor([[0.0, 0.0], [-896.0, 2.0]])
    rounded, scale = quantize_rows_fp8(x)
    assert torch.equal(rounded.float() * scale, x)
    assert rounded[1].tolist() == [-448.0, 1.0]
    packed = pack_fp8(x, None)
    assert fp8_linear(torch.ones(1, 2), packed).tolist() == [[0.0, -894.0]]


def test_the_batch_changes_no_bit() -> None:
    gen = torch.Generator().manual_seed(1)
    x, packed = torch.randn(70, 130, generator=gen), pack_fp8(torch.randn(300, 130, generator=gen), torch.randn(300))
    together = fp8_linear(x, packed)
    for rows in (slice(0, 1), slice(5, 12), slice(3, 40)):
        assert torch.equal(fp8_linear(x[rows], packed), together[rows])
