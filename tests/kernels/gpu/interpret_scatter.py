"""The scatter kernel against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.scatter import triton as scatter
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected(x: Tensor, index: Tensor, rows: Tensor, add: bool) -> Tensor:
    rows = rows.to(x.dtype)
    return x.index_add(0, index, rows) if add else x.index_copy(0, index, rows)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("made", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_dtype(dtype: torch.dtype, made: torch.dtype, add: bool) -> None:
    x, rows, index = torch.randn(9, 40).to(dtype), torch.randn(4, 40).to(made), torch.tensor([8, 0, 3, 4])
    wanted = expected(x, index, rows, add)
    assert scatter.scatter_rows_(x, index, rows, add) is x
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dim", [1, 100, 128, 129])
def test_a_level_of_longer_rows(dim: int, add: bool) -> None:
    wide, index = torch.randn(5, 3 * dim + 1).to(torch.bfloat16), torch.randperm(7)[:5]
    x = torch.randn(8, 2 * dim).to(torch.bfloat16)
    kept, level = x.clone(), wide[:, dim : 2 * dim]
    with launch_config.override_config("scatter", {"BLOCK": 64}):
        scatter.scatter_rows_(x[:, :dim], index, level, add)
    assert torch.equal(x[:, :dim], expected(kept[:, :dim], index, level, add))
    assert torch.equal(x[:, dim:], kept[:, dim:])


def test_no_rows() -> None:
    x = torch.ones(2, 4)
    assert scatter.scatter_rows_(x, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4), False).sum() == 8
