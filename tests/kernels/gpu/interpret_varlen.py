"""Packed attention's Triton kernel against the reference, with NaN beside every head and after the last row."""

from __future__ import annotations

import random

import pytest
import torch
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.varlen import triton as varlen
from sensorium.kernels.varlen.reference import varlen_attention as varlen_attention_reference
from torch import Tensor

LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (4e-3, 8e-3), torch.float16: (5e-4, 1e-3)}


def packed(rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v as views into the result of one product, surrounded by NaN."""
    wide = torch.full((rows + 3, 3 * heads + 1, dim + 8), float("nan"), dtype=dtype)
    qkv = wide[:rows, : 3 * heads, :dim]
    qkv.copy_(torch.randn(qkv.shape))
    return qkv.split(heads, 1)


def check(lengths: list[int], heads: int, dim: int, dtype: torch.dtype, scale: float | None = None) -> None:
    q, k, v = packed(sum(lengths), heads, dim, dtype)
    scale = dim**-0.5 if scale is None else scale
    atol, rtol = LIMITS[dtype]
    wide = varlen_attention_reference(q.float(), k.float(), v.float(), lengths, scale)
    torch.testing.assert_close(varlen.varlen_attention(q, k, v, lengths, scale).float(), wide, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("dim", [8, 16, 36, 64, 72, 80, 88, 92, 112, 128, 192, 200, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check([37, 70], 2, dim, dtype)


@pytest.mark.parametrize("lengths", [[1], [64], [128], [64] * 5, [129, 3, 0, 64, 200], [33, 127, 32, 65], [300]])
def test_segments(lengths: list[int]) -> None:
    check(lengths, 1, 80, torch.bfloat16)


@pytest.mark.parametrize("config", [{"QUERIES": 16, "KEYS": 16}, {"QUERIES": 32, "KEYS": 64}, {"QUERIES": 64, "KEYS": 16}])
def test_every_tile_is_right(config: dict[str, int]) -> None:
    with launch_config.override_config("varlen_attention", config):
        check([5, 48, 81], 2, 72, torch.bfloat16)


def test_steep_scores() -> None:
    check([40, 90], 2, 64, torch.bfloat16, scale=3.0)


def test_segments_are_blind_to_each_other() -> None:
    q, k, v = packed(150, 2, 40, torch.float32)
    before = varlen.varlen_attention(q, k, v, [70, 80], 0.2)
    k[70:], v[70:] = 1e4, 1e4
    assert torch.equal(varlen.varlen_attention(q, k, v, [70, 80], 0.2)[:70], before[:70])


def test_no_rows() -> None:
    assert varlen.varlen_attention(*torch.zeros(3, 0, 2, 64), [], 0.2).shape == (0, 2, 64)


def test_numbers_of_a_head_that_lie_apart() -> None:
    q, k, v = torch.randn(3, 2, 64, 50).permute(0, 3, 1, 2)  # [rows, heads, dim] with rows innermost
    found = varlen.varlen_attention(q, k, v, [20, 30], 0.2)
    torch.testing.assert_close(found, varlen_attention_reference(q, k, v, [20, 30], 0.2), atol=1e-5, rtol=1e-5)


def test_a_head_in_two_parts() -> None:
    found = {dim: varlen.split_head_dim(dim) for dim in range(1, 257)}
    assert found[64] == (64, 0)
    assert found[80] == (64, 16)
    for dim, (main, more) in found.items():
        assert main + more >= dim
        assert more < main
        assert main + more <= max(16, 2 * dim)


def test_tiles_cover_every_row_once_and_long_segments_first() -> None:
    table = varlen.tiles((3, 0, 40, 17), 16, torch.device("cpu")).tolist()
    assert table == [[3, 3, 43], [19, 3, 43], [35, 3, 43], [43, 43, 60], [59, 43, 60], [0, 0, 3]]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_random_segments(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [choose.choice((1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 190)) for _ in range(choose.randint(1, 4))]
    check(lengths, choose.randint(1, 3), choose.randint(1, 32) * 8, choose.choice(list(LIMITS)))
