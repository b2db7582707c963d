"""4-bit linear layers in Triton against the dequantised weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.linear import linear, pack
from sensorium.kernels.linear.grouped import GroupedWeight
from sensorium.kernels.linear.int4 import Int4Options, quantize_int4
from sensorium.kernels.linear.triton import int4

TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}
SHAPES = {"a row in shares": (1, 1216, 40), "few in shares": (5, 1100, 33), "many": (70, 71, 50)}  # rows, in, out
KINDS = {"128": Int4Options(128), "64": Int4Options(64, symmetric=False), "32": Int4Options(32, symmetric=False)}


@pytest.fixture(autouse=True)
def _small_tiles():
    with launch_config.override_config("int4", TILES):
        yield


def check(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> None:
    assert int4.supports(weight)
    out = torch.empty(len(x), len(weight.codes) + 3, dtype=x.dtype)
    int4.int4_linear(x, weight, bias, out[:, 3:])
    wanted = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    limit = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[x.dtype]
    torch.testing.assert_close(out[:, 3:].double(), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_products(shape: tuple[int, int, int], kind: Int4Options, dtype: torch.dtype) -> None:
    rows, inner, outer = shape
    weight = quantize_int4((torch.randn(outer, inner) / inner**0.5).to(dtype), kind)
    bias = torch.randn(outer).to(dtype) if kind.symmetric else None
    check(torch.randn(rows, inner).to(dtype), weight, bias)


def test_one_group_of_all_inputs() -> None:
    weight = replace(quantize_int4(torch.randn(20, 48), Int4Options(128)), scale=torch.rand(20, 1), group=1 << 20)
    check(torch.randn(3, 48), weight, None)


def test_codes_of_all_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    check(torch.eye(64), GroupedWeight(codes, torch.ones(8, 2), 32, 64, packed=True, offset=8), None)


def test_a_linear_layer_runs_the_kernel() -> None:
    """Shards follow each other, rows may be quantised to int8, and an unsupported shard runs in torch."""
    x, weight, bias = torch.randn(5, 96), torch.randn(40, 96), torch.randn(40)
    for options in (Int4Options(32), Int4Options(32, symmetric=False, int8_rows=True)):
        with use_backends("int4_linear=torch"):
            packed = pack(weight, bias, options)
            expected = linear(x, packed)
        with use_backends("int4_linear=triton"):
            torch.testing.assert_close(linear(x, packed), expected, rtol=1e-4, atol=1e-4)
            first, second = (packed.shards[0].select(rows) for rows in (slice(0, 16), slice(16, 40)))
            parts = replace(packed, shards=[first, replace(second, factor=torch.ones(1))])
            torch.testing.assert_close(linear(x, parts), expected, rtol=1e-4, atol=1e-4)
