"""Angles of rotary embedding from one, two and three axes, and the tolerance of rotated values."""

from __future__ import annotations

import torch
from sensorium.kernels.rope import rotary_cos_sin
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AXES = {
    "one": [0] * 16,
    "sections": [0] * 4 + [1] * 6 + [2] * 6,
    "interleaved": [0, 1, 2] * 5 + [0],
    "image": [0] * 8 + [1] * 8,
}


def near(found: Tensor, wanted: Tensor, rounds: int = 1) -> None:
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=rounds * eps, atol=max(rounds * eps, 2e-6))


def cos_sin_of(rows: int, half: int, axes: str) -> tuple[Tensor, Tensor]:
    axis = torch.tensor(AXES[axes][:half] + [0] * (half - 16))
    return rotary_cos_sin(torch.randint(5000, (3, rows)), torch.rand(half), axis)
