"""Tiling policies compared with the published functions, over sizes with extreme ratios."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sensorium.mm.errors import ConfigError, InputError
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.overlapped_tiles import OverlappedTiles, PaddedOverlappedTiles
from sensorium.mm.tiling import (
    AnyResTiles,
    AspectTiles,
    BoundedResize,
    CanvasTiles,
    CenterCrop,
    ClosestTiles,
    CoveringTiles,
    CropPad,
    CropPlan,
    EdgeTiles,
    FixedSize,
    LargeImageTiles,
    LongSideTiles,
    PaddedAspectTiles,
    PaddedPage,
    PaddedSquare,
    PaddedSquareTiles,
    PageTiles,
    PanAndScan,
    PatchLimit,
    PatchRange,
    PatchTarget,
    QuarterTiles,
    Resize,
    SliceTiles,
    WindowTiles,
    fit,
    grids_by_rows,
    unpad,
)

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


@pytest.mark.parametrize(("edge", "patch"), [(1024, 16), (1540, 28), (700, 14)])
def test_bounded_sizes(edge, patch):
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    policy = BoundedResize((edge, edge), (patch, patch))
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        want = get_resize_output_image_size(make_image(size), edge, patch, "channels_first")
        assert plan.views[0].tile_size == tuple(max(patch, side) for side in want), size


@pytest.mark.parametrize(("patch", "most"), [(16, 256), (14, 20), (16, 1024)])
def test_patch_limit(patch, most):
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    for size in GRID:
        plan = PatchLimit(patch, most).plan(*size)
        check_plan(plan)
        assert plan.views[0].tile_size == get_image_size_for_max_num_patches(*size, patch, most), size


@pytest.mark.parametrize(("least", "most"), [(1024, 13312), (4, 8), (16, 100)])
def test_ranges_of_patches(least, most):
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import get_patch_grid_size as published

    policy = PatchRange(16, 2, least, most)
    for size in GRID:
        try:
            grid = published(*size, 16, 2, least, most)
        except ZeroDivisionError:
            with pytest.raises(InputError, match="differ too much"):
                policy.plan(*size)
            continue
        plan = policy.plan(*size)
        assert plan.views[0].tile_size == (16 * grid[0], 16 * grid[1]), size
        assert grid[0] * grid[1] >= least
        check_plan(plan)


@pytest.mark.parametrize("patches", [1024, 60, 4])
def test_targets_of_patches(patches):
    from transformers.models.nemotron_h_omni import video_processing_nemotron_h_omni as published

    rule = published.NemotronH_Omni_Reasoning_V3VideoProcessor._compute_target_patches
    options = SimpleNamespace(video_target_num_patches=patches, video_maintain_aspect_ratio=True, _downsample_factor=2)
    policy = PatchTarget(16, 2, patches)
    for size in GRID:
        wide, tall = rule(options, *size)
        assert policy.plan(*size).views[0].tile_size == (16 * tall, 16 * wide), size


def test_closest_tiles_keep_area_and_shape():
    policy = ClosestTiles((448, 448), 1, 12)
    grids = {size: policy.plan(*size).tiles for size in [(448, 448), (896, 896), (1344, 1344), (500, 2000), (3000, 500)]}
    assert grids == {(448, 448): (0, 0), (896, 896): (2, 2), (1344, 1344): (3, 3), (500, 2000): (1, 4), (3000, 500): (6, 1)}


def test_pages_are_shrunk_and_put_in_the_middle():
    policy = PaddedPage((2048, 1648))
    for size, fitted, corner in [
        ((1000, 501), (1000, 501), (524, 573)), ((4096, 1000), (2048, 500), (0, 574)), ((3000, 6000), (824, 1648), (612, 0)),
    ]:  # fmt: skip
        resized, window = policy.plan(*size).views[0].steps
        assert (resized, window) == (Resize(*fitted), CropPad(-corner[0], -corner[1], 2048, 1648, (255, 255, 255)))
    with pytest.raises(InputError, match="differ too much for a page"):
        policy.plan(20_011, 1)


def test_center_crop():
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor

    processor = CLIPImageProcessor(do_rescale=False, do_normalize=False)
    for size in ((2, 3), (97, 777), (1080, 13), (224, 224), (225, 301)):
        for crop in ((224, 224), (200, 301)):
            plan = CenterCrop(224, crop).plan(*size)
            check_plan(plan)
            resize, window = plan.views[0].steps
            pixels = torch.arange(size[0] * size[1]).reshape(1, *size).expand(3, -1, -1).to(torch.uint8)
            image = processor.resize(pixels, processor_size(processor))
            assert tuple(image.shape[-2:]) == (resize.height, resize.width), size
            want = processor.center_crop(image, SimpleNamespace(height=crop[0], width=crop[1]))
            assert torch.equal(windowed(image, window), want), (size, crop)


def processor_size(processor: object) -> object:
    from transformers.image_utils import SizeDict

    return SizeDict(shortest_edge=processor.size["shortest_edge"])


def windowed(image: torch.Tensor, window: CropPad) -> torch.Tensor:
    out = torch.zeros(3, window.height, window.width, dtype=image.dtype)
    for row in range(max(0, -window.top), min(window.height, image.shape[1] - window.top)):
        left, right = max(0, -window.left), min(window.width, image.shape[2] - window.left)
        out[:, row, left:right] = image[:, row + window.top, left + window.left : right + window.left]
    return out


def test_fixed():
    assert FixedSize((384, 512)).plan(7, 9000).views[0].steps == (Resize(384, 512),)


POLICIES = [
    FixedSize((4, 4)), CenterCrop(4, (4, 4)), BoundedResize((8, 8), (2, 2)), AspectTiles((4, 4), 1, 3),
    AnyResTiles((4, 4), (4, 4), ((4, 8),)),
    EdgeTiles(8, 4), PanAndScan((4, 4), 1, 2, 1.5),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_an_image_without_pixels_is_refused(policy):
    with pytest.raises(InputError, match="has no pixels"):
        policy.plan(0, 5)


def test_invalid_policies_are_refused():
    for make in (
        lambda: AspectTiles((4, 4), 3, 2), lambda: AnyResTiles((4, 4), (4, 4), ()),
        lambda: AnyResTiles((4, 4), (4, 4), ((6, 4),)),
        lambda: PanAndScan((4, 4), 0, 2, 1.5),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make()


PUBLISHED = [
    FixedSize((448, 448)),
    CenterCrop(336, (336, 336)),
    PatchLimit(16, 1024),
    BoundedResize((1540, 1540), (28, 28)),
    AspectTiles((448, 448), 1, 12),
    PaddedSquareTiles(1024, (127, 127, 127), AspectTiles((768, 768), 2, 6)),
    AnyResTiles((384, 384), (384, 384), ONEVISION),
    EdgeTiles(4 * 364, 364),
    QuarterTiles(378, 980),
    SliceTiles(448, 56, 9),
    CoveringTiles(448, 12),
    PanAndScan((896, 896), 256, 4, 1.2),
    OverlappedTiles(14, 27),
    PaddedOverlappedTiles(14, 24),
]


@pytest.mark.parametrize("policy", PUBLISHED, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("long", [1, 200, 16_384, 65_000, 189_000])
def test_steps_of_the_longest_images_that_media_admits_are_bounded(policy, long):
    """The pixels of every step, besides those cut out of the image itself."""
    short = -(-long // int(MediaPolicy().max_aspect_ratio))
    for size in ((long, short), (short, long), (long, 1 + long // 100), (1 + long // 100, long)):
        try:
            plan = policy.plan(*size)
        except InputError:
            continue
        steps = {view.steps[:end] for view in plan.views for end in range(1, len(view.steps) + 1)}
        made = sum(
            step.height * step.width for *_, step in steps if isinstance(step, Resize) or step.height * step.width < 1 << 22
        )
        assert made <= 64 << 20, (size, made)


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


def test_padded_square():
    from transformers import LlavaOnevisionImageProcessor

    policy, published = PaddedSquare((384, 384), (127, 0, 255)), LlavaOnevisionImageProcessor()
    for size in [size for size in GRID if max(size) < 4096]:
        plan = policy.plan(*size)
        check_plan(plan)
        window, resize = plan.views[0].steps
        assert resize == Resize(384, 384)
        marked = torch.zeros(3, *size, dtype=torch.uint8) + 7
        padded = published.pad_to_square(marked, (127, 0, 255))
        assert padded.shape[1:] == (window.height, window.width)
        (top, left), (bottom, right) = ((padded[0] == 7).nonzero()[i].tolist() for i in (0, -1))
        assert (-window.top, -window.left, bottom - top + 1, right - left + 1) == (top, left, *size)
    window = policy.plan(100, 20_000).views[0].steps[1]
    assert (window.height, window.width) == (384, 384), "a square of 20,000 pixels a side is not made"


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
