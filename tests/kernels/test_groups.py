"""Products with stored formats (GGML's blocks, FP8, FP4, NF4, integers of 8 bits) against the dequantised weight in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from cpu import running_with
from group_weights import STORED_FORMATS, block_weight, stored_weight
from sensorium.kernels import native
from sensorium.kernels.linear import linear
from sensorium.kernels.linear.grouped import GroupedWeight, QuantizedWeight, ShardedWeight
from sensorium.kernels.linear.groups import GroupPanelWeight, pack_groups, packed_bytes
from torch import Tensor

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native.products() is None, reason="needs the C++ products")


@pytest.fixture(params=["best", "avx512_bf16", "avx512_vnni", "avx2"])
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with the fastest C++ products of this CPU, and with those of older CPUs."""
    with running_with(request.param) if request.param in native.LEVELS else nullcontext():
        yield request.param


@pytest.mark.parametrize("outputs", [75, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.usefixtures("products")
def test_products_with_the_dequantised_weight(name: str, dtype: torch.dtype, outputs: int) -> None:
    weight = stored_weight(name, outputs)
    bias = torch.randn(outputs).to(dtype)
    packed = pack_groups([weight], bias, dtype)
    assert isinstance(packed, GroupPanelWeight)
    values = weight.dequantize().double()
    for rows in (0, 1, 2, 5, 21):
        x = torch.randn(rows, weight.shape[1]).to(dtype)
        expected = x.double() @ values.T + bias.double()
        limit = error_bound(x, weight) if dtype == torch.float32 else 1e-2 * expected.abs() + 1e-2 * values.norm(dim=1)
        assert ((linear(x, packed).double() - expected).abs() <= limit).all()


def error_bound(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return 16 units of float32 of the sum of magnitudes.

    A weight with minima or zero points sums codes and inputs apart, so magnitudes are those of codes times scales: a few times
    the largest weight of an output.
    """
    values = weight.dequantize().double().abs()
    return x.double().abs() @ (4 * values.amax(1, keepdim=True).expand_as(values)).T * 2**-24 * 16 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.usefixtures("products")
def test_rows_do_not_see_each_other(name: str, dtype: torch.dtype) -> None:
    weight = stored_weight(name, 75)
    packed, x = pack_groups([weight], None, dtype), torch.randn(40, weight.shape[1]).to(dtype)
    whole = linear(x, packed)
    assert [n for n in (1, 2, 3, 4, 5, 6, 7, 11, 13, 33) if not torch.equal(linear(x[:n], packed), whole[:n])] == []
    order = torch.randperm(len(x))
    assert torch.equal(linear(x[order], packed), whole[order])


@pytest.mark.parametrize("name", STORED_FORMATS)
@pytest.mark.usefixtures("products")
def test_the_plan_has_the_packed_bytes(name: str) -> None:
    """Bytes are known before the weights are, and are the stored ones where a code has 4 or 8 bits."""
    weight = stored_weight(name, 128)
    packed = pack_groups([weight], None, torch.float32)
    assert isinstance(packed, GroupPanelWeight)
    assert packed_bytes([weight.map(lambda tensor: tensor.to("meta"))], torch.float32, CPU) == packed.nbytes
    if name in ("Q4_0", "Q4_1", "Q8_0"):
        assert packed.nbytes == weight.nbytes + 4 * 128  # and a bias


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_1", "Q4_0", "Q8_0"), ("IQ4_NL", "IQ4_NL", "IQ4_NL")])
def test_shards_of_different_formats(kinds: tuple[str, ...]) -> None:
    """Adjacent shards of one format are joined; every output is at its place."""
    shards = [block_weight(kind, rows, 256 // (32 if kind[-1] in "01L" else 256), i)
              for i, (kind, rows) in enumerate(zip(kinds, (40, 24, 72), strict=True))]  # fmt: skip
    packed, x = pack_groups(shards, torch.randn(136), torch.float32), torch.randn(3, 256)
    assert isinstance(packed, GroupPanelWeight)
    assert len(packed.panels) == len(set(kinds))
    bias = torch.cat([panels.bias[: panels.outputs] for panels in packed.panels])
    expected = x.double() @ torch.cat([shard.dequantize() for shard in shards]).double().T + bias.double()
    torch.testing.assert_close(linear(x, packed).double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_not_a_number_among_fp8_weights_stays_one(value: float) -> None:
    """The C++ kernel has no NaN among its e4m3 codes, so torch dequantises such a weight."""
    weight = torch.randn(16, 32)
    weight[3, 5] = value
    packed = pack_groups([GroupedWeight(weight.to(torch.float8_e4m3fn), torch.ones(1, 1), 32, 32, 16)], None, torch.float32)
    assert isinstance(packed, ShardedWeight)
    out = linear(torch.randn(2, 32), packed)
    assert out[:, 3].isnan().all()
    assert out[:, 4].isfinite().all()


def test_every_code_of_fp8_is_its_value() -> None:
    """Also the subnormal ones and -0."""
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[codes & 127 != 127].view(-1, 2)
    weight = GroupedWeight(codes.view(torch.float8_e4m3fn), torch.ones(len(codes), 1), 2, 2)
    assert torch.equal(linear(torch.eye(2), pack_groups([weight], None, torch.float32)), weight.dequantize().T)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q8_0", "IQ4_XS"])
def test_one_input_reads_one_weight(kind: str) -> None:
    """Against unit vectors, each output is a single weight, so the order of sums plays no part."""
    weight = block_weight(kind, 20, 1)
    values = weight.dequantize()
    found = linear(torch.eye(weight.inputs), pack_groups([weight], None, torch.float32)).T
    torch.testing.assert_close(found, values, rtol=2e-6, atol=values.abs().max().item() * 2e-6)
