"""Weights of 4 bits: rounding to nearest, and products against the dequantised weight in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from cpu import running_with
from sensorium.kernels import native
from sensorium.kernels.linear import linear, pack
from sensorium.kernels.linear.groups import GroupPanelWeight
from sensorium.kernels.linear.int4 import Int4Options, quantize_int4
from sensorium.kernels.linear.int8 import quantize_rows
from sensorium.models.memory_formulas import packed_weight_bytes

CPU = torch.device("cpu")
SIZES = [(256, 96), (33, 48), (200, 17), (1000, 130), (8, 1)]  # (in, out)
OPTIONS = [Int4Options(128), Int4Options(32, symmetric=False), Int4Options(64, symmetric=False, int8_rows=True)]


@pytest.fixture(params=["best", "avx512_bf16", "avx512_vnni", "avx2", "torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with the fastest C++ products of this CPU, with those of older CPUs, and in torch."""
    if request.param == "torch":
        monkeypatch.setenv("SENSORIUM_KERNELS", "int4_linear=torch")
    with running_with(request.param) if request.param in native.LEVELS else nullcontext():
        yield request.param


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_are_rounded_to_the_nearest_code(size: tuple[int, int], symmetric: bool) -> None:
    weight = torch.randn(size[::-1])
    weight[0, :32] = 0
    quantised = quantize_int4(weight, Int4Options(32, symmetric))
    steps = quantised.scale.repeat_interleave(32, 1)[:, : size[0]]
    error = (quantised.dequantize() - weight).abs() / torch.where(steps > 0, steps, 1)
    assert error.max() <= (1.001 if symmetric else 0.501 + 0.5)  # the largest code is 7, and a zero point is an integer
    assert error.mean() < 0.27
    assert (quantised.dequantize()[0, :32] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("products")
def test_products_with_the_dequantised_weight(size: tuple[int, int], options: Int4Options, dtype: torch.dtype) -> None:
    weight, bias = (torch.randn(size[::-1]) / size[0] ** 0.5).to(dtype), torch.randn(size[1]).to(dtype)
    packed = pack(weight, bias, options)
    for rows in (0, 1, 2, 7, 21, 100):
        x = torch.randn(rows, size[0]).to(dtype)
        given = x.double()
        if options.int8_rows:
            codes, scale = quantize_rows(x)
            given = codes.double() * scale
        expected = given @ quantize_int4(weight, options).dequantize().double().T + bias.double()
        limit = 1e-5 if dtype == torch.float32 else 5e-3
        torch.testing.assert_close(linear(x, packed).double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("products")
def test_rows_do_not_see_each_other(options: Int4Options, dtype: torch.dtype) -> None:
    packed, x = pack(torch.randn(144, 264).to(dtype), None, options), torch.randn(130, 264).to(dtype)
    whole = linear(x, packed)
    assert [n for n in (1, 2, 3, 5, 6, 7, 11, 13, 49, 97) if not torch.equal(linear(x[:n], packed), whole[:n])] == []
    order = torch.randperm(len(x))
    assert torch.equal(linear(x[order], packed), whole[order])


@pytest.mark.parametrize("group", [8, 24, 32, 128, 4096])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiles_give_the_bits_of_vectors(group: int, symmetric: bool) -> None:
    """AMX and AVX-512 agree on every bit of W4A8, also if groups are no multiple of a tile and the last one is shorter."""
    weight, x, options = torch.randn(75, 1000), torch.randn(70, 1000).bfloat16(), Int4Options(group, symmetric, int8_rows=True)
    results = []
    for instructions in ("amx", "avx512_vnni"):
        with running_with(instructions):
            results.append(linear(x, pack(weight.bfloat16(), None, options)))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_packed_weight(size: tuple[int, int], options: Int4Options, dtype: torch.dtype, products: str) -> None:
    packed = pack(torch.randn(size[::-1]).to(dtype), None, options)
    assert isinstance(packed, GroupPanelWeight) == (products != "torch" and native.products() is not None)
    assert packed.nbytes == packed_weight_bytes(*size, False, dtype, CPU, options)  # type: ignore[union-attr]
