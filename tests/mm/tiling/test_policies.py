"""Tests that hold for every tiling policy: it refuses empty images, and its intermediate images are bounded."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.tiling.aspect import AspectTiles, PaddedSquareTiles
from sensorium.mm.tiling.canvas import AnyResTiles
from sensorium.mm.tiling.longest import EdgeTiles, PanAndScan, QuarterTiles
from sensorium.mm.tiling.overlapped import OverlappedTiles, PaddedOverlappedTiles
from sensorium.mm.tiling.plan import Resize
from sensorium.mm.tiling.slices import CoveringTiles, SliceTiles
from sensorium.mm.tiling.whole import BoundedResize, CenterCrop, FixedSize, PatchLimit
from tilings import ONEVISION

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
@pytest.mark.parametrize("ratio", [200, 500, 200_000])
@pytest.mark.parametrize("long", [1, 200, 16_384, 65_000, 189_000])
def test_steps_of_the_longest_images_that_media_admits_are_bounded(policy, long, ratio):
    """The pixels of every step, besides those cut out of the image itself."""
    short = -(-long // ratio)
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
