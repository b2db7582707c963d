"""8-bit linear layers in Triton against their references."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.linear.eight_bit import Int8Weight
from sensorium.kernels.linear.fp8 import fp8_linear_reference, pack_fp8, quantize_rows_fp8
from sensorium.kernels.linear.int8 import int8_linear_reference, quantize_rows
from sensorium.kernels.linear.triton import eight_bit as linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_quantised_bit_for_bit(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 100) * 3).to(dtype)
    x[1] = 0.0
    x[2] = torch.arange(100) - 50 + 0.5  # ties
    x[2, 0] = 127.0
    for found, wanted in zip(linear.quantize_rows(x), quantize_rows(x), strict=True):
        assert torch.equal(found, wanted)


TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
SHAPES = {"a row in shares": (1, 600, 40), "few in shares": (5, 1100, 33), "many": (37, 70, 50)}  # rows, in, out


@pytest.fixture(autouse=True)
def _small_tiles():
    with launch_config.override_config("linear", TILES), launch_config.override_config("linear_sum", {"BLOCK": 32}):
        yield


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_int8(shape: tuple[int, int, int], dtype: torch.dtype, biased: bool) -> None:
    rows, inner, outer = shape
    x, bias = torch.randn(rows, inner).to(dtype), torch.randn(outer).to(dtype) if biased else None
    weight, scale = quantize_rows(torch.randn(outer, inner) / inner**0.5)
    weights = Int8Weight(weight, scale.flatten(), bias)
    torch.testing.assert_close(linear.int8_linear(x, weights), int8_linear_reference(x, weights))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_weights_alone_in_8_bits(shape: tuple[int, int, int], dtype: torch.dtype, kind: torch.dtype) -> None:
    """Weights are int8, or the bytes of 8-bit floats."""
    rows, inner, outer = shape
    x, scale = torch.randn(rows, inner).to(dtype), torch.rand(outer) / inner**0.5
    if kind == torch.int8:
        weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
        wide, scale = weight.float(), scale / 40
    else:
        eight = torch.randn(outer, inner).to(torch.float8_e4m3fn)
        weight, wide = eight.view(torch.uint8), eight.float()
    found = linear.scaled_mm(x, None, weight, scale, None, dtype)
    near = {} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, (x.double() @ wide.double().T * scale).to(dtype), **near)


def test_every_float_of_8_bits_is_itself() -> None:
    weight = torch.arange(256, dtype=torch.uint8)
    weight[weight & 127 == 127] = 0  # NaN
    found = linear.scaled_mm(torch.eye(1, 16), None, weight[:, None].repeat(1, 16), torch.ones(256), None, torch.float32)
    assert torch.equal(found[0], weight.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8(dtype: torch.dtype, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are quantised too on GPUs that multiply 8-bit floats."""
    monkeypatch.setattr(launch_config, "gpu_info", lambda: launch_config.GpuInfo(arch, 4))
    x, weights = torch.randn(5, 300).to(dtype), pack_fp8(torch.randn(40, 300).to(dtype) / 17, torch.randn(40).to(dtype))
    found, wanted = linear.fp8_linear(x, weights), fp8_linear_reference(x, weights)
    if arch == "sm_90":
        rows, scale = quantize_rows_fp8(x)
        torch.testing.assert_close(linear.quantize_rows_fp8(x), (rows, scale), rtol=0, atol=0)
        wanted = fp8_linear_reference(rows.float() * scale, weights).to(dtype)
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=max(1e-5, torch.finfo(dtype).eps))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_rows_and_weights_as_floats_of_8_bits(shape: tuple[int, int, int]) -> None:
    rows, inner, outer = shape
    x, weight = (torch.randn(n, inner).to(torch.float8_e4m3fn) for n in (rows, outer))
    x_scale, scale, bias = torch.rand(rows, 1), torch.rand(outer) / inner**0.5, torch.randn(outer)
    found = linear.scaled_mm(x, x_scale, weight, scale, bias, torch.bfloat16)
    wanted = (x.double() @ weight.double().T * x_scale * scale + bias).to(torch.bfloat16)
    torch.testing.assert_close(found, wanted)
