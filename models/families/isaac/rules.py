"""The positions of Isaac's images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.positions import PlacedItem, grid_indices, needs_axes, range_positions
from ....mm.rules import register


@register
@needs_axes
def grid_from_zero(start: int, items: Sequence[PlacedItem], axes: int, number: int) -> tuple[Tensor, int]:
    """Count lines and columns from 0. Only time begins where the text ended; later text continues after the last step."""

    def place(position: int, first: int, last: int) -> tuple[Tensor, int]:
        grid = grid_indices(items[0][1], last - first)
        time = grid[:1] + position
        return torch.cat([time.expand(axes - 2, -1), grid[1:]]), int(time.max()) + 1

    return range_positions(start, items, axes, place)
