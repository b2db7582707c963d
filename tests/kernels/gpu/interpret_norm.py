"""The norms' Triton kernel against the references."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.norm import triton as norm
from sensorium.kernels.norm.reference import rms_norm_reference
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 8), (5, 100), (2, 3, 64), (3, 1280), (17, 72), (2, 5000)]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows with a mean, a residual, weight and bias."""
    weight, bias = torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1])
    return tuple(t.to(dtype) for t in (torch.randn(shape) * 3 + 1, torch.randn(shape), weight, bias))  # type: ignore[return-value]


def near(found: Tensor, wanted: Tensor) -> None:
    """Compare within one rounding; float32 sums have another order."""
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=max(eps, 2e-6), atol=max(eps * 1e-2, 2e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float, added: bool) -> None:
    x, add, weight, _ = made(shape, dtype)
    stream = x + add if added else x.clone()
    near(norm.rms_norm(x, weight, 1e-6, add if added else None, offset), rms_norm_reference(stream, weight, 1e-6, offset))
    assert torch.equal(x, stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, added: bool) -> None:
    x, add, weight, bias = made(shape, dtype)
    stream = x + add if added else x.clone()
    wanted = F.layer_norm(stream, shape[-1:], weight, bias, 1e-5)
    near(norm.layer_norm(x, weight, bias, 1e-5, add if added else None), wanted)
    assert torch.equal(x, stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(5, 3, 64), (1, 7, 80), (4, 1, 128)])
def test_heads_that_are_a_part_of_longer_rows(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    longer = torch.randn(rows, heads + 2, dim + 16).to(dtype)
    kept, weight = longer.clone(), (torch.rand(dim) + 0.5).to(dtype)
    norm.norm_heads_(longer[:, 1:-1, :dim], weight, 1e-6, 0.0)
    near(longer[:, 1:-1, :dim], rms_norm_reference(kept[:, 1:-1, :dim], weight, 1e-6))
    longer[:, 1:-1, :dim] = kept[:, 1:-1, :dim]
    assert torch.equal(longer, kept)


def test_rows_that_are_apart() -> None:
    longer, weight = torch.randn(4, 96), torch.rand(64)
    near(norm.rms_norm(longer[:, :64], weight, 1e-6), rms_norm_reference(longer[:, :64], weight, 1e-6))


def test_no_rows() -> None:
    assert norm.rms_norm(torch.empty(0, 64), torch.rand(64), 1e-6).shape == (0, 64)
