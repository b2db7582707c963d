"""Products in 8 bits against their references."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.gpu import linear
from sensorium.kernels.int8 import quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_quantised_bit_for_bit(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 100) * 3).to(dtype)
    x[1] = 0.0
    x[2] = torch.arange(100) - 50 + 0.5  # ties
    x[2, 0] = 127.0
    for found, wanted in zip(linear.quantize_rows(x), quantize_rows(x), strict=True):
        assert torch.equal(found, wanted)
