"""Rotary embedding's Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from rotary_angles import DTYPES, cos_sin_of, near
from sensorium.kernels.rope import triton as rope
from sensorium.kernels.rope.reference import rotate_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "axes"),
    [(1, 1, 8, "one"), (5, 3, 32, "sections"), (3, 18, 80, "image"), (2, 20, 24, "interleaved")],
)
def test_rotate(rows: int, heads: int, dim: int, axes: str, interleaved: bool, dtype: torch.dtype) -> None:
    """Heads are part of longer heads in longer rows; the rest is unchanged."""
    longer, cos_sin = torch.randn(rows, heads + 2, dim + 8).to(dtype), cos_sin_of(rows, dim // 2, axes)
    wanted = longer.clone()
    wanted[:, 1:-1, 8:] = rotate_reference(longer[:, 1:-1, 8:], *cos_sin, interleaved)
    rope.rotate_(longer[:, 1:-1, 8:], *cos_sin, interleaved)
    near(longer, wanted)
