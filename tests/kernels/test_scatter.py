"""Scattering encoder rows into a batch."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.scatter import scatter_rows_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_put_or_added_where_the_index_says(dtype: torch.dtype) -> None:
    x, rows, index = torch.randn(6, 8).to(dtype), torch.randn(3, 24), torch.tensor([4, 0, 5])
    first, second = rows[:, :8], rows[:, 8:16]
    kept = x.clone()
    assert scatter_rows_(x, index, first) is x
    scatter_rows_(x, index, second, add=True)
    for i in range(6):
        wanted = kept[i]
        if i in (4, 0, 5):
            at = index.tolist().index(i)
            wanted = first[at].to(dtype) + second[at].to(dtype)
        assert torch.equal(x[i], wanted)
