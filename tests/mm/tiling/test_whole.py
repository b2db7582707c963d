"""Policies of `mm/tiling/whole.py` compared with the published functions, over sizes with extreme ratios."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.mm.tiling.plan import CropPad, Resize, TiledView
from sensorium.mm.tiling.whole import (
    BoundedResize,
    BoundedSides,
    CenterCrop,
    FixedSize,
    PaddedPage,
    PaddedSquare,
    PatchLimit,
    PatchRange,
    PatchTarget,
)
from tilings import GRID, check_plan, make_image


@pytest.mark.parametrize(("edge", "patch"), [(1024, 16), (1540, 28), (700, 14)])
def test_bounded_sizes(edge, patch):
    from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

    policy = BoundedResize((edge, edge), (patch, patch))
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        want = get_resize_output_image_size(make_image(size), edge, patch, "channels_first")
        assert plan.views[0].tile_size == tuple(max(patch, side) for side in want), size


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        ((480, 640), 1806336, (476, 644)),
        ((1080, 1920), 1806336, (546, 980)),
        ((100, 140), 1806336, (224, 308)),  # 313.6 pixels, and 21.4 patches of 22.5
        ((1, 1000), 1806336, (14, 980)),  # first 224 x 224,000
        ((2000, 2000), 100_000, (98, 98)),  # 980 x 980, times 0.104
        ((7, 7), 1806336, (224, 224)),
    ],
)
def test_bounded_sides(size, most, expected):
    policy = BoundedSides(14, 980, 224, most)
    assert policy.plan(*size).views == (TiledView((Resize(*expected),)),)
    assert policy.plan(*size[::-1]).views[0].tile_size == expected[::-1]


def test_bounded_sides_of_every_size():
    policy = BoundedSides(14, 980, 224, 1806336)
    for size in GRID:
        plan = policy.plan(*size)
        check_plan(plan)
        sides = plan.views[0].tile_size
        assert all(14 <= side <= 980 and side % 14 == 0 for side in sides), size


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
