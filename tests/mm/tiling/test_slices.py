"""Policies of `mm/tiling/slices.py` and `overlapped.py` compared with the published functions."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import ConfigError
from sensorium.mm.tiling.overlapped import OverlappedTiles
from sensorium.mm.tiling.plan import CropPad, Resize
from sensorium.mm.tiling.slices import CoveringTiles, SliceTiles
from tilings import GRID, check_plan


@pytest.mark.parametrize("most", [1, 6, 12])
def test_covering_tiles(most):
    from transformers.models.ovis2.image_processing_ovis2 import get_min_tile_covering_grid

    for size in GRID:
        columns, rows = get_min_tile_covering_grid(size, 448, most)
        plan = CoveringTiles(448, most).plan(*size)
        check_plan(plan)
        assert plan.tiles == ((rows, columns) if rows * columns > 1 else (0, 0)), size


@pytest.mark.parametrize(("side", "slices", "mode"), [(448, 9, "16x"), (448, 9, "4x"), (336, 16, "16x"), (448, 1, "16x")])
def test_slices(side, slices, mode):
    from transformers.models.minicpmv4_6.image_processing_minicpmv4_6 import MiniCPMV4_6ImageProcessor

    processor, multiple = MiniCPMV4_6ImageProcessor(), 14 * (4 if mode == "16x" else 2)
    for size in GRID:
        plan = SliceTiles(side, multiple, slices).plan(*size)
        grid = processor.get_sliced_grid(size, slices, side)
        whole = processor.find_best_resize(size, side, 14, mode, allow_upscale=grid is None)
        assert plan.views[0].tile_size == whole, size
        assert plan.tiles == tuple(grid or (0, 0)), size
        if grid is not None:
            cut = processor.get_refine_size(size, grid, side, 14, mode, allow_upscale=True)
            assert (plan.views[1].steps[0].height, plan.views[1].steps[0].width) == cut, size


@pytest.mark.parametrize("most", [1, 4, 8])
def test_overlapped_tiles_of_molmo2(most):
    from transformers.models.molmo2 import image_processing_molmo2 as published

    policy = OverlappedTiles(14, 27, (4, 4), most)
    for size in GRID:
        rows, columns, *canvas = published.compute_crop_geometry(*size, most, [4, 4], 378, 14)
        plan = policy.plan(*size)
        assert plan.tiles == (rows, columns)
        assert {view.steps[0] for view in plan.views} == {Resize(378, 378), Resize(*canvas)}
        assert plan.views[-1].steps[1] == CropPad(canvas[0] - 378, canvas[1] - 378, 378, 378)
        assert plan.num_tiles == rows * columns + 1
    with pytest.raises(ConfigError, match="leave nothing"):
        OverlappedTiles(14, 8)
