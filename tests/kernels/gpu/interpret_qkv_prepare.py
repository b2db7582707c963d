"""QK norm, rotary embedding and the write to the KV cache in one Triton kernel against the references, one by one."""

from __future__ import annotations

import pytest
import torch
from paged import quantized_copy
from rotary_angles import DTYPES, cos_sin_of, near
from sensorium.kernels.norm.reference import rms_norm_reference
from sensorium.kernels.qkv_prepare.triton import prepare_qkv_
from sensorium.kernels.rope.reference import rotate_reference


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
    prepare_qkv_(qkv, cache, slots, cos_sin, interleaved, None if norms is None else (*norms, 1e-6, offset or 0.0))
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
    prepare_qkv_(qkv, found, slots, *rest)
    prepare_qkv_(other, cache, slots, *rest)
    assert torch.equal(qkv, other)
    assert torch.equal(found, quantized_copy(cache, codes))
    assert not torch.equal(found, before)
