"""The positions of Keye-VL-1.5's videos, whose slow and fast frames differ in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ....mm.positions import PlacedItem, grid_positions, needs_axes, range_positions
from ....mm.rules import Rule, register
from ....mm.types import ItemGeometry


@register
@needs_axes
def frames_of_sizes(
    start: int, items: Sequence[PlacedItem], axes: int, number: int, *sides: tuple[int, int]
) -> tuple[Tensor, int]:
    """Place each run of rows as a frame of its own size."""
    steps = iter(steps_of(items[0][1]))

    def place(position: int, first: int, last: int) -> tuple[Tensor, int]:
        rows = grid_positions(position, next(steps), axes, last - first)
        return rows, int(rows.max()) + 1

    return range_positions(start, items, axes, place)


def with_sides(grid: ItemGeometry, sides: Sequence[tuple[int, int]]) -> ItemGeometry:
    """Return the geometry of a video with a frame of each of these sizes, `(height, width)` in patches before merging.

    Text separates the rows of two frames. The height and width of the geometry are those of the first frame.
    """
    h, w = sides[0]
    first = replace(grid, h=h, w=w, extra=0)
    rows = sum((h // grid.merge) * (w // grid.merge) for h, w in sides)
    return replace(first, extra=rows - first.num_embeds, positions=Rule.of(frames_of_sizes, *sides))


def steps_of(geometry: ItemGeometry) -> list[ItemGeometry]:
    """Return the grid of each frame, for frames that differ in size; none if they do not."""
    sides = () if geometry.positions is None else geometry.positions.params
    return [replace(geometry, t=1, h=h, w=w, extra=0, positions=None) for h, w in sides]
