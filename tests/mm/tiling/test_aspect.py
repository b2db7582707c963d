"""Policies of `mm/tiling/aspect.py` compared with the published functions, over sizes with extreme ratios."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.tiling.aspect import AspectTiles, ClosestTiles, LargeImageTiles, PaddedAspectTiles, PageTiles
from tilings import GRID, check_plan, make_image


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (1, 6), (2, 9), (4, 4), (1, 40)])
def test_best_aspect_ratio(least, most):
    from transformers.models.got_ocr2 import image_processing_got_ocr2 as published

    processor = published.GotOcr2ImageProcessor(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=least, max_patches=most
    )
    policy = AspectTiles((448, 448), least, most)
    for size in GRID:
        columns, rows = published.get_optimal_tiled_canvas(size, (448, 448), least, most)
        plan = policy.plan(*size)
        check_plan(plan)
        assert plan.tiles == ((rows, columns) if rows * columns > 1 else (0, 0)), size
        assert plan.num_tiles == processor.get_number_of_image_patches(*size), size


def test_tiles_of_known_sizes():
    policy = AspectTiles((448, 448), 1, 12)
    assert [policy.plan(tall, wide).num_tiles for tall, wide in ((448, 448), (448, 896), (1080, 1920))] == [1, 3, 9]
    bare = AspectTiles((448, 448), 1, 12, thumbnail=False).plan(448, 896)
    assert (bare.num_tiles, bare.tiles) == (2, (1, 2))


@pytest.mark.parametrize(
    "dense",
    [{}, {"tiles": 40, "scale": 0.9}, {"tiles": 40, "ratios": (1.2, 3.0)}, {"tiles": 40, "scale": 0.5, "ratios": (1.2, 0)}],
)
def test_dense_pages_of_granite_docling(dense):
    from transformers.models.granite_docling import image_processing_granite_docling as published

    least, most = dense.get("ratios", (0, 0))
    given = (dense.get("tiles", 0), dense.get("scale", 0.0), least, most)
    policy = PageTiles((64, 64), 1, 20, dense_tiles=given[0], dense_scale=given[1], dense_ratios=(least, most))
    for size in (*GRID, (500, 2000), (1000, 1500), (2000, 700), (60, 3000)):
        rows, columns = published.get_page_tile_grid(*size, {"height": 64, "width": 64}, True, 1, 20, *given)
        plan = policy.plan(*size)
        check_plan(plan)
        assert plan.tiles == ((rows, columns) if rows * columns > 1 else (0, 0)), size


@pytest.mark.parametrize("most", [1, 4, 16, 36])
def test_padded_tiles_of_phi4(most):
    from transformers.models.phi4_multimodal.image_processing_phi4_multimodal import Phi4MultimodalImageProcessor

    processor = Phi4MultimodalImageProcessor()
    for size in GRID:
        try:
            padded, _ = processor.dynamic_preprocess(make_image(size), 448, 14, 32, max_num=most)
        except ValueError:
            with pytest.raises(InputError, match="crop it"):
                PaddedAspectTiles((448, 448), 1, most).plan(*size)
            continue
        plan = PaddedAspectTiles((448, 448), 1, most).plan(*size)
        check_plan(plan)
        assert (plan.tiles[0] * 448, plan.tiles[1] * 448) == tuple(padded.shape[1:]), size


@pytest.mark.parametrize(("tile", "tokens", "most"), [(512, (64, 256), 10), (64, (4, 16), 4)])
def test_tiles_of_large_images(tile, tokens, most):
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    processor, squares = Lfm2VlImageProcessor(), {"encoder_patch_size": 16, "downsample_factor": 2}
    least, limit = (count * 32**2 for count in tokens)
    policy = LargeImageTiles(16, 2, least, limit, 2.0, AspectTiles((tile, tile), 2, most))
    for size in GRID:
        plan = policy.plan(*size)
        wide, tall = processor.smart_resize(*size, min_image_tokens=tokens[0], max_image_tokens=tokens[1], **squares)
        assert plan.views[-1].tile_size == (tall, wide), size
        is_large = processor._is_image_too_large(*size, max_image_tokens=tokens[1], max_pixels_tolerance=2.0, **squares)
        columns, rows, *_ = processor._get_grid_layout(*size, 2, most, tile) if is_large else (0, 0)
        assert plan.tiles == (rows, columns), size
        assert plan.num_tiles == rows * columns + 1
    assert policy.plan(5000, 5000).views[0].tile_size == (tile, tile)


def test_closest_tiles_keep_area_and_shape():
    policy = ClosestTiles((448, 448), 1, 12)
    grids = {size: policy.plan(*size).tiles for size in [(448, 448), (896, 896), (1344, 1344), (500, 2000), (3000, 500)]}
    assert grids == {(448, 448): (0, 0), (896, 896): (2, 2), (1344, 1344): (3, 3), (500, 2000): (1, 4), (3000, 500): (6, 1)}
