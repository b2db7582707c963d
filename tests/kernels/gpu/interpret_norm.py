"""The norms' Triton kernels against their references."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.gpu import norm
from sensorium.kernels.norm import rms_norm_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 100), (2, 3, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), (torch.rand(shape[-1]) + 0.5).to(dtype)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
