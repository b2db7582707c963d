"""The kernels that resize, normalise and lay out images, bit for bit against torch's filter on a CPU."""

from __future__ import annotations

import random

import pytest
import torch
from sensorium.kernels import dispatch
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.pixels import reference, resize
from sensorium.kernels.pixels import triton as pixels
from sensorium.kernels.pixels.layout import Normalization, PatchLayout
from sensorium.mm.tiling.aspect import AspectTiles
from sensorium.mm.tiling.longest import EdgeTiles
from sensorium.mm.tiling.plan import CropPad, CropPlan, Resize, TiledView, TilingPolicy
from sensorium.mm.types import ItemGeometry
from sensorium.processors.device import MediaDevice, processing_on
from sensorium.processors.images import patchify_crops
from sensorium.processors.patches import PatchSpec, patchify
from torch import Tensor

PLAIN = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
CLIP = Normalization((122.7709, 116.7460, 104.0937), (68.5005, 66.6322, 70.3232))
SMALL = {"ROWS": 16, "COLUMNS": 32}


class Filled:
    """A tiling policy that shrinks the image and pads it with grey."""

    def plan(self, height: int, width: int) -> CropPlan:
        return CropPlan((TiledView((Resize(height // 2, width // 2), CropPad(-1, 2, 13, 19, (90, 91, 92)))),))


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8)


def check(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> None:
    wanted = reference.preprocess_frames(frames, target, filter, normalization, layout, dtype)
    with launch_config.override_config("pixels", SMALL):
        assert torch.equal(pixels.preprocess_frames(frames, target, filter, normalization, layout, dtype), wanted)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(30, 47), (8, 8), (90, 20), (1, 3), (13, 40), (24, 100)])
def test_planes_before_scaling(size: tuple[int, int], filter: str) -> None:
    check(noise(1, *size), (24, 40), filter, PLAIN, PatchLayout(), torch.float32)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
def test_sums_beyond_a_byte(filter: str) -> None:
    frames = torch.where(noise(1, 27, 31) > 127, 255, 0).to(torch.uint8)
    check(frames, (40, 20), filter, PLAIN, PatchLayout(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    check(noise(1, 17, 19), (12, 24), "bicubic", CLIP, PatchLayout(6, 2), dtype)


@pytest.mark.parametrize(("n", "temporal"), [(1, 2), (3, 2), (2, 1)])
def test_frames_of_a_patch(n: int, temporal: int) -> None:
    check(noise(n, 13, 11), (8, 16), "bilinear", CLIP, PatchLayout(4, 2, temporal), torch.float32)


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_merged_squares(merge: int) -> None:
    check(noise(1, 31, 45), (12 * merge, 8 * merge), "bilinear", CLIP, PatchLayout(4, merge), torch.float32)


def test_planes_of_several_images() -> None:
    check(noise(3, 20, 25), (16, 10), "bicubic", CLIP, PatchLayout(), torch.bfloat16)


def test_a_part_of_an_image() -> None:
    check(noise(2, 40, 60)[:, 5:25, 7:40], (16, 18), "bicubic", CLIP, PatchLayout(), torch.float32)


def test_channels_that_lie_apart() -> None:
    check(noise(1, 40, 30).transpose(1, 2), (16, 18), "bicubic", CLIP, PatchLayout(), torch.float32)


@pytest.mark.parametrize("n", [1, 3])
def test_patches_of_a_processor(n: int) -> None:
    frames, spec, grid = noise(n, 50, 61), PatchSpec(patch=7), ItemGeometry((n + 1) // 2, 4, 6, 2)
    wanted = patchify(frames, grid, spec, torch.bfloat16)
    with dispatch.use_backends("pixels=triton"), processing_on(MediaDevice(torch.device("cpu"))):
        assert torch.equal(patchify(frames, grid, spec, torch.bfloat16), wanted)


@pytest.mark.parametrize("tiling", [AspectTiles((13, 13), 1, 3, True), EdgeTiles(28, 14), Filled()])
def test_pieces_of_a_processor(tiling: TilingPolicy) -> None:
    """Tiles and the whole image, consecutive resizes, padding; the sides do not divide evenly."""
    frames, plan = noise(1, 20, 31), tiling.plan(20, 31)
    wanted = patchify_crops(frames, plan, PatchSpec(), PatchLayout(3, 2))
    with dispatch.use_backends("pixels=triton"), processing_on(MediaDevice(torch.device("cpu"))):
        assert torch.equal(patchify_crops(frames, plan, PatchSpec(), PatchLayout(3, 2)), wanted)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
def test_bytes(filter: str) -> None:
    """Resize to bytes, also from a permuted view."""
    for frames in (noise(2, 20, 31), noise(3, 20, 31).permute(3, 1, 2, 0)):
        with dispatch.use_backends("pixels=triton"):
            found = resize(frames, (9, 40), filter)
        assert torch.equal(found, reference.resize(frames, (9, 40), filter))


def test_tiles_as_they_are_shipped() -> None:
    frames, layout = noise(1, 20, 300), PatchLayout(7, 2)
    found = pixels.preprocess_frames(frames, (28, 140), "bicubic", CLIP, layout, torch.float32)
    assert torch.equal(found, reference.preprocess_frames(frames, (28, 140), "bicubic", CLIP, layout, torch.float32))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_random_images(seed: int) -> None:
    choose = random.Random(seed)
    layout = (
        PatchLayout(choose.randint(2, 16), choose.randint(1, 3), choose.randint(1, 2))
        if choose.random() < 0.7
        else PatchLayout()
    )
    side = max(1, layout.patch * layout.merge)
    target = tuple(side * max(1, choose.randint(1, 80) // side) for _ in "hw")
    size = choose.randint(1, 150), choose.randint(1, 150)
    filter = choose.choice(["bilinear", "bicubic", "lanczos"])
    check(noise(choose.randint(1, 3), *size), target, filter, CLIP, layout, torch.float32)
