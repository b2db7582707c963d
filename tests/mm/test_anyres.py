"""Encoder rows of images in tiles; the parity suite compares the counts of whole prompts with transformers."""

import pytest
from sensorium.mm.tiling.canvas import AnyResTiles
from sensorium.models.families.llava.config import PINPOINTS_336, PINPOINTS_384, UNTILED, anyres_layout, max_patches_per_row

FEW = AnyResTiles((336, 336), (336, 336), PINPOINTS_336)
MANY = AnyResTiles((384, 384), (384, 384), PINPOINTS_384)


def test_padding_is_cut_off() -> None:
    """An image twice as wide as high fills two adjacent tiles; a wider one has padding above and below, which is cut off."""
    whole = anyres_layout(300, 600, FEW, 24, None)
    assert (whole.tiles, whole.kept, whole.size) == ((1, 2), (24, 48), (24, 48))
    assert whole.rows == 24 * 49
    assert anyres_layout(336, 1008, FEW, 24, None).kept == (24, 72)
    assert anyres_layout(200, 1008, FEW, 24, None).kept == (14, 72)


def test_many_tiles_are_pooled() -> None:
    one = anyres_layout(2000, 2000, MANY, 27, 9)
    assert one.kept == (27 * one.tiles[0], 27 * one.tiles[1])
    assert one.size[0] * one.size[1] <= 9 * 27 * 27 < one.kept[0] * one.kept[1]
    assert anyres_layout(400, 400, MANY, 27, 9).size == anyres_layout(400, 400, MANY, 27, 9).kept


def test_an_untiled_image_has_one_more_row() -> None:
    assert UNTILED.rows == 1


@pytest.mark.parametrize(("tiling", "side", "max_tiles"), [(FEW, 24, None), (MANY, 27, 9)])
def test_max_patches_per_row_bounds_all_images(tiling: AnyResTiles, side: int, max_tiles: int | None) -> None:
    most_dense = max_patches_per_row(tiling, side, max_tiles)
    for height, width in [(1, 1), (100, 3000), (3000, 100), (640, 480), (2000, 1999), (384, 1000), (50, 40), (4000, 900)]:
        one = anyres_layout(height, width, tiling, side, max_tiles)
        patches = (one.tiles[0] * one.tiles[1] + 1) * side**2
        assert patches <= 1.01 * most_dense * (side**2 + one.rows)
