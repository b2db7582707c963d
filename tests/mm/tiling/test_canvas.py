"""Policies of `mm/tiling/canvas.py` compared with the published functions, over sizes with extreme ratios."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sensorium.mm.tiling.canvas import AnyResTiles, CanvasTiles
from sensorium.mm.tiling.sizes import fit, grids_by_ratio, grids_by_rows, unpad
from tilings import GRID, NEXT, ONEVISION, check_plan, make_image


@pytest.mark.parametrize("enlarge", [False, True])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_best_canvas_of_llama4(most, enlarge):
    from transformers.image_utils import SizeDict
    from transformers.models.llama4 import image_processing_llama4 as published

    published.find_supported_resolutions.cache_clear()
    canvases = torch.tensor(published.find_supported_resolutions(most, SizeDict(height=336, width=336)))
    policy = CanvasTiles(336, most, enlarge)
    for size in GRID:
        target = tuple(published.get_best_fit(size, canvases, enlarge).tolist())
        room = target if enlarge else tuple(min(max(side, 336), full) for side, full in zip(size, target, strict=True))
        plan = policy.plan(*size)
        check_plan(plan)
        first, window = plan.views[0].steps
        assert (window.height, window.width) == target, size
        assert (first.height, first.width) == tuple(max(1, n) for n in published.get_max_res_without_distortion(size, room))


def test_the_canvases_of_many_tiles_take_time_in_proportion():
    grids = grids_by_ratio(4096)  # comparing all ratios with all grids took a minute
    assert sorted(grids) == list(grids_by_rows(4096))
    ratios = [rows / columns for rows, columns in grids]
    assert sum(a != b for a, b in pairwise(ratios)) == len(set(ratios)) - 1  # equal ones follow each other
    assert grids[0] == (1, 4096)


@pytest.mark.parametrize("most", [1, 4, 6])
def test_best_canvas_of_mllama(most):
    from transformers.models.mllama import image_processing_mllama as published

    policy = CanvasTiles(448, most, thumbnail=False, by_ratio=False)
    assert list(grids_by_rows(most)) == published.get_all_supported_aspect_ratios(most)
    for size in GRID:
        target = published.get_optimal_tiled_canvas(*size, most, 448)
        plan = policy.plan(*size)
        check_plan(plan)
        first, window = plan.views[0].steps
        assert (window.height, window.width) == target, size
        assert (first.height, first.width) == published.get_image_size_fit_to_canvas(*size, *target, 448), size


@pytest.mark.parametrize(("side", "sizes"), [(336, NEXT), (384, ONEVISION)])
def test_pinpoints(side, sizes):
    from transformers import image_processing_utils as helpers
    from transformers.image_utils import ChannelDimension
    from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    processor = LlavaNextImageProcessor()
    policy = AnyResTiles((side, side), (side, side), sizes)
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        best = helpers.select_best_resolution(size, [list(one) for one in sizes])
        assert policy.best(*size) == best, size
        assert plan.num_tiles == image_size_to_num_patches(size, [list(one) for one in sizes], side), size
        resize, window = plan.views[1].steps
        inside = helpers.get_patch_output_size(make_image(size), best, ChannelDimension.FIRST)
        assert (resize.height, resize.width) == inside == fit(*size, best), size
        left, top, right, bottom = processor._get_padding_size(inside, best)
        assert (-window.left, -window.top) == (left, top), size
        assert (window.width, window.height) == (left + inside[1] + right, top + inside[0] + bottom), size


@pytest.mark.parametrize("side", [24, 27])
def test_unpad_equals_the_published_function(side):
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    tile = (side * 14, side * 14)
    policy = AnyResTiles(tile, tile, tuple((tall // 336 * tile[0], wide // 336 * tile[1]) for tall, wide in NEXT))
    for size in GRID:
        rows, columns = policy.plan(*size).tiles
        grid = (rows * side, columns * side)
        want = unpad_image(torch.empty((1, *grid), device="meta"), size).shape[1:]
        kept = unpad(*size, grid)
        assert all(max(0, ours) == theirs for ours, theirs in zip(kept, want, strict=True)), size


def test_llava_next_counts():
    """The rows are those of the base image, of the tiles without padding, and one at the end of each line."""
    policy = AnyResTiles((336, 336), (336, 336), NEXT)
    counts = []
    for size in ((336, 336), (480, 640), (640, 480)):
        rows, columns = policy.plan(*size).tiles
        tall, wide = unpad(*size, (rows * 24, columns * 24))
        counts.append(24 * 24 + tall * wide + tall)
    assert counts == [1176, 2340, 2352]
