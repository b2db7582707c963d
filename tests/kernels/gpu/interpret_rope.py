"""Rotary embedding's Triton kernels against the references, with angles from one, two and three axes."""

from __future__ import annotations

import pytest
import torch
from paged import quantized_copy
from sensorium.kernels.gpu import rope
from sensorium.kernels.norm import rms_norm_reference
from sensorium.kernels.rope import rotary_cos_sin, rotate_reference
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "half", "axes"),
    [
        (3, 4, 2, 32, 16, "sections"),
        (1, 9, 1, 24, 12, "interleaved"),
        (4, 3, 3, 40, 8, "one"),
        (2, 6, 2, 16, 0, "one"),
    ],
)
def test_place(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    axes: str,
    offset: float | None,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    """The fused kernel equals norm, partial rotation and cache write one by one; a negative slot is skipped."""
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    cache = torch.randn(2, 3, 4, kv_heads, dim).to(dtype)
    slots = torch.randperm(12)[:rows]
    slots[-1] = -1 if rows > 2 else slots[-1]
    cos_sin = cos_sin_of(rows, half, axes) if half else None
    norms = None if offset is None else ((torch.rand(dim) + 0.5).to(dtype), (torch.rand(dim) + 0.5).to(dtype))
    q, k, v = (part.clone() for part in qkv.split((heads, kv_heads, kv_heads), 1))
    if norms is not None and offset is not None:
        q, k = (rms_norm_reference(part, weight, 1e-6, offset) for part, weight in zip((q, k), norms, strict=True))
    if cos_sin is not None:
        for part in (q, k):
            part[..., : 2 * half] = rotate_reference(part[..., : 2 * half], *cos_sin, interleaved)
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted.flatten(1, 2)[:, slot] = torch.stack((k[row], v[row]))
    rest = qkv[:, heads:].clone()
    rope.prepare_qkv_(qkv, cache, slots, cos_sin, interleaved, None if norms is None else (*norms, 1e-6, offset or 0.0))
    near(qkv[:, :heads], q, 2)
    near(cache, wanted, 2)
    assert torch.equal(qkv[:, heads:], rest)
    assert torch.equal(cache.flatten(1, 2)[1], wanted.flatten(1, 2)[1])


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [None, 0.0])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim", "half"), [(3, 4, 2, 32, 16), (1, 9, 3, 24, 8)])
def test_place_in_codes(
    rows: int, heads: int, kv_heads: int, dim: int, half: int, offset: float | None, interleaved: bool, codes: torch.dtype
) -> None:
    """The cache holds the quantised values of an unquantised one, bit for bit; a negative slot is skipped."""
    dtype = DTYPES[(rows + interleaved) % 3]
    qkv, cache = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype), torch.randn(2, 3, 4, kv_heads, dim).to(dtype)
    slots, before, other = torch.randperm(12)[:rows], quantized_copy(cache, codes), qkv.clone()
    slots[-1] = -1 if rows > 2 else slots[-1]
    weight = (torch.rand(dim) + 0.5).to(dtype)
    rest = cos_sin_of(rows, half, "one"), interleaved, None if offset is None else (weight, weight, 1e-6, offset)
    found = before.clone()
    rope.prepare_qkv_(qkv, found, slots, *rest)
    rope.prepare_qkv_(other, cache, slots, *rest)
    assert torch.equal(qkv, other)
    assert torch.equal(found, quantized_copy(cache, codes))
    assert not torch.equal(found, before)
