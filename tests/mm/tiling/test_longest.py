"""Policies of `mm/tiling/longest.py` compared with the published functions, over sizes with extreme ratios."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.tiling.longest import EdgeTiles, LongSideTiles, PanAndScan, QuarterTiles, WindowTiles
from sensorium.mm.tiling.plan import CropPad
from tilings import GRID, check_plan, make_image


@pytest.mark.parametrize(("longest", "tile"), [(1456, 364), (2048, 512), (1820, 364), (364, 364), (5000, 512), (1000, 333)])
def test_edge_tiles(longest, tile):
    from transformers.models.idefics3 import image_processing_idefics3 as published

    policy = EdgeTiles(longest, tile)
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        first = published.get_resize_output_image_size(make_image(size), longest)
        recorder = SimpleNamespace(resize=lambda image, size, resample: (size.height, size.width))
        second = published.Idefics3ImageProcessor.resize_for_vision_encoder(recorder, make_image(first), tile)
        assert [(step.height, step.width) for step in plan.views[0].steps] == [first, second], size
        rows, columns = math.ceil(second[0] / tile), math.ceil(second[1] / tile)
        assert plan.tiles == ((rows, columns) if rows * columns > 1 else (0, 0)), size
        assert plan.views[-1].tile_size == (tile, tile)
    assert EdgeTiles(longest, tile, split=False).plan(500, 900).num_tiles == 1


@pytest.mark.parametrize("most", [1, 4, 16])
def test_tiles_along_the_longer_side(most):
    """The published rule of Phi-3-vision, as vLLM's phi3v.py describes it."""
    for size in GRID:
        long, short, scale = max(size), min(size), 1
        while scale * math.ceil(scale / (long / short)) <= most:
            scale += 1
        wide = 336 * (scale - 1)
        tall = int(wide / (long / short))
        policy = LongSideTiles(336, most)
        if not tall:
            with pytest.raises(InputError, match="crop it"):
                policy.plan(*size)
            continue
        plan = policy.plan(*size)
        check_plan(plan)
        tiles = (-(-tall // 336), scale - 1)
        assert plan.tiles == (tiles if size[0] <= size[1] else tiles[::-1]), size


@pytest.mark.parametrize(("shortest", "longest"), [(378, 980), (42, 112), (336, 336)])
def test_quarters(shortest, longest):
    from transformers.image_utils import SizeDict
    from transformers.models.idefics2 import image_processing_idefics2 as published

    policy, bounds = QuarterTiles(shortest, longest), SizeDict(shortest_edge=shortest, longest_edge=longest)
    for size in GRID:
        if min(size) < 2:
            with pytest.raises(InputError, match="do_image_splitting=False"):
                policy.plan(*size)
            continue
        plan = policy.plan(*size)
        views = published.Idefics2ImageProcessor.split_images(None, make_image(size)[None])[0]
        assert [view.tile_size for view in plan.views] == [
            published.get_resize_output_image_size(view, bounds) for view in views
        ], size
        assert plan.views[-1:] == QuarterTiles(shortest, longest, split=False).plan(*size).views


@pytest.mark.parametrize(("least", "most", "ratio"), [(256, 4, 1.2), (1, 8, 1.0), (448, 2, 2.0), (97, 3, 1.5)])
def test_pan_and_scan(least, most, ratio):
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

    processor, policy = Gemma3ImageProcessor(), PanAndScan((896, 896), least, most, ratio)
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        published = processor.pan_and_scan_batched(make_image(size)[None], least, most, ratio)
        want = [tuple(crop.shape[-2:]) for crop in published if crop.numel()]
        crops = [view.steps[0] for view in plan.views[1:]]
        assert [(crop.height, crop.width) for crop in crops] == want, size
        assert all(isinstance(crop, CropPad) and crop.top >= 0 and crop.left >= 0 for crop in crops)


@pytest.mark.parametrize(
    ("size", "tiles", "window"),
    [
        ((480, 640), (0, 0), 0),  # small and not long
        ((200, 700), (1, 4), 200),  # small and long: 3.5 windows of the shorter side
        ((728, 728), (2, 2), 504),  # 1.44 windows
        ((1008, 1512), (2, 3), 504),
        ((1100, 1512), (2, 3), 504),  # 2.18 windows: at most a fifth is not one more
        ((300, 800), (1, 2), 504),  # less than a window: padded
        ((200, 4000), (1, 20), 151),  # shrunk to 3024 x 151
        ((20, 100), (0, 0), 0),  # padded to a square
        ((20, 800), (2, 2), 504),
    ],
)
def test_windows_of_step3(size, tiles, window):
    plan = WindowTiles(728, 504, 3024).plan(*size)
    assert plan.tiles == tiles
    assert plan.num_tiles == tiles[0] * tiles[1] + 1
    if window:
        assert plan.views[0].tile_size == (window, window)
    assert WindowTiles(728, 504, 3024, cut=False).plan(*size).views == plan.views[-1:]


def test_slivers_of_step3_are_squares():
    assert WindowTiles(728, 504, 3024).plan(20, 800).views[-1].tile_size == (800, 800)
    assert WindowTiles(728, 504, 3024).plan(1, 4000).views[-1].tile_size == (3024, 3024)
