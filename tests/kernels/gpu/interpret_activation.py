"""The activations' Triton kernels against the references."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.activation import triton as activation
from sensorium.kernels.activation.reference import CLAMPED_SWIGLU, REFERENCES
from sensorium.kernels.activation.reference import act_and_mul as act_and_mul_reference
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def near(found: Tensor, wanted: Tensor, rounds: int) -> None:
    """Compare within so many roundings; torch's erf is a polynomial with an error of 2e-7, here times up to 40."""
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=max(rounds * eps, 2e-6), atol=1e-5)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers of all magnitudes: most around 0, some where activations are flat."""
    return (torch.randn(shape) * torch.tensor([0.1, 1.0, 4.0, 12.0])[torch.randint(4, shape)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 1100), (2, 4, 33), (0, 8)])
def test_plain(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = numbers(*shape, dtype=dtype)
    near(activation.activation(name, x), REFERENCES[name](x), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*REFERENCES, CLAMPED_SWIGLU])
@pytest.mark.parametrize(("rows", "inner"), [(1, 8), (3, 100), (2, 1500), (0, 16)])
def test_gated(name: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    x = numbers(rows, 2 * inner + 8, dtype=dtype)[:, : 2 * inner]
    near(activation.act_and_mul(name, x), act_and_mul_reference(name, x), 6 if name == CLAMPED_SWIGLU else 2)  # roundings
