"""The positions of HunYuan-VL's images (XD-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.positions import PlacedItem, needs_axes, text_positions
from ....mm.rules import register


@register
@needs_axes
def lines_on_a_page(start: int, items: Sequence[PlacedItem], axes: int, number: int) -> tuple[Tensor, int]:
    """Count columns, lines and images from 0 on the last three axes; everything else has the position of its token.

    The first and the last row are those around the image. Those between are the lines of the grid, each with a row at its end.
    """
    where, geometry = items[0]
    positions = text_positions(start, where.length, axes).clone()
    _, h, w = geometry.merged
    lines, columns = torch.meshgrid(torch.arange(h), torch.arange(w + 1), indexing="ij")
    grid = torch.stack([columns, lines, torch.full_like(lines, number)]).flatten(1)
    positions[-3:, 1 : 1 + grid.shape[1]] = grid
    return positions, start + where.length
