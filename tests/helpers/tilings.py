"""Sizes of images for the tests of tiling policies, and a check of what all plans have in common."""

from __future__ import annotations

import torch
from sensorium.mm.tiling.plan import CropPlan

SIDES = (1, 2, 13, 97, 336, 364, 448, 512, 777, 1080, 1920, 4097, 20011)
GRID = [(tall, wide) for tall in SIDES for wide in SIDES]
NEXT = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


def make_image(size: tuple[int, int]) -> torch.Tensor:
    return torch.empty((3, *size), device="meta")


def check_plan(plan: CropPlan) -> None:
    """Check that all steps have pixels, all tiles of an image have one size, and the numbers of tiles agree."""
    assert all(min(step.height, step.width) > 0 for view in plan.views for step in view.steps)
    assert all(view.steps[-1].height % view.rows == 0 and view.steps[-1].width % view.columns == 0 for view in plan.views)
    assert len({view.tile_size for view in plan.views}) == 1
    assert plan.num_tiles == sum(view.rows * view.columns for view in plan.views)
    assert plan.tiles[0] * plan.tiles[1] in (0, plan.num_tiles, plan.num_tiles - 1)
