"""Chooses the sizes of an image's views by its letters (MiniCPM-OCR): views with small dense letters are enlarged.

Source: the image processor of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ....mm.tiling.plan import CropPad, CropPlan, Resize, Size, TiledView
from ....mm.tiling.slices import SliceTiles

_SMALL, _DENSE = 12.0, 2.0  # maximum of the median letter's height in pixels; minimum of letters per 1,000 pixels
_TINY_AREA, _TINY_SIDE = 6272, 84  # smaller images without such letters are enlarged to this side
_LUMA, _HALF, _BITS = (19595, 38470, 7471), 32768, 16  # Pillow's grey, in integers
_LEAST_AREA, _LEAST_HEIGHT, _LONGEST = 3, 2, 0.9  # of a letter; the last as a part of the image's side


def plan_by_letters(pixels: Tensor, tiling: SliceTiles) -> CropPlan:
    """Return the views of an image, uint8 `[height, width, 3]`: the whole image, and each slice as a view of its own."""
    height, width = pixels.shape[:2]
    plan = tiling.plan(height, width)
    if plan.tiles == (0, 0):
        return CropPlan((TiledView((Resize.to(_fitted(pixels, tiling)),)),))
    whole, cut = plan.views
    rows, columns = plan.tiles
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return CropPlan((whole, *(_slice(pixels, tiling, cut, place) for place in places)), plan.tiles)


def _slice(pixels: Tensor, tiling: SliceTiles, cut: TiledView, place: tuple[int, int]) -> TiledView:
    """Return a slice at the size for its letters if it then has fewer rows, otherwise at the usual size."""
    height, width = pixels.shape[:2]
    (tall, wide), (row, column) = cut.tile_size, place
    usual = TiledView((*cut.steps, CropPad(row * tall, column * wide, tall, wide)))
    top, bottom = (round(height * line / cut.rows) for line in (row, row + 1))
    left, right = (round(width * line / cut.columns) for line in (column, column + 1))
    cell = pixels[top:bottom, left:right]
    if not cell.numel() or (bottom - top) * (right - left) > tiling.side**2:
        return usual
    size = _fitted(cell, tiling)
    if size[0] * size[1] >= tall * wide:
        return usual
    return TiledView((CropPad(top, left, bottom - top, right - left), Resize.to(size)))


def _fitted(pixels: Tensor, tiling: SliceTiles) -> Size:
    """Return (height, width) for the letters of an image."""
    height, width = pixels.shape[:2]
    if has_small_letters(pixels):
        return tiling.fitted(height, width, True)
    if height * width < _TINY_AREA:
        return replace(tiling, side=_TINY_SIDE).fitted(height, width, True)
    return tiling.fitted(height, width, False)


def has_small_letters(pixels: Tensor) -> bool:
    """Return whether an image, uint8 `[height, width, 3]`, has many small shapes that differ from its background."""
    import cv2

    height, width = pixels.shape[:2]
    grey = ((pixels.to(torch.int32) * torch.tensor(_LUMA, dtype=torch.int32)).sum(-1, dtype=torch.int32) + _HALF) >> _BITS
    _, black = cv2.threshold(grey.numpy().astype(np.uint8), 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    shapes = black == 0
    if shapes.mean() > 0.5:
        shapes = ~shapes
    _, _, boxes, _ = cv2.connectedComponentsWithStats(shapes.astype(np.uint8), connectivity=8)
    wide, tall, area = boxes[1:, 2], boxes[1:, 3], boxes[1:, 4]
    is_letter = (area >= _LEAST_AREA) & (tall >= _LEAST_HEIGHT) & (wide < _LONGEST * width) & (tall < _LONGEST * height)
    heights = tall[is_letter]
    return len(heights) > 0 and np.median(heights) <= _SMALL and len(heights) * 1000.0 / (width * height) >= _DENSE
