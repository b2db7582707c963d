"""Policies that choose the grid of tiles by the image's aspect ratio."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...callers.errors import ConfigError, InputError
from .plan import CropPad, CropPlan, Resize, Size, TiledView
from .sizes import arrangements, check_size
from .whole import FixedSize

_MIN_SIDE = 10  # pixels of an image that PaddedAspectTiles resized


@dataclass(frozen=True)
class AspectTiles:
    """Resize to the grid of `min_tiles` to `max_tiles` with the nearest aspect ratio, cut the tiles, and append a thumbnail.

    If grids are equally near, a larger one wins if its area is less than twice the image's. No side has more than `max_side`
    tiles. Rule: InternVL.
    """

    tile: Size
    min_tiles: int
    max_tiles: int
    thumbnail: bool = True
    max_side: int = 1 << 30

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles:
            tiles = f"{self.min_tiles} to {self.max_tiles} tiles"
            raise ConfigError(f"{tiles} are requested; give a maximum that is not below the minimum")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self.arrangement(height, width)
        if rows * columns == 1:
            return FixedSize(self.tile).plan(height, width)
        cut = TiledView((Resize(self.tile[0] * rows, self.tile[1] * columns),), rows, columns)
        whole = (TiledView((Resize.to(self.tile),)),) if self.thumbnail else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of tiles."""
        return self._nearest(height, width, self.max_tiles)

    def _nearest(self, height: int, width: int, most: int) -> Size:
        grids = (grid for grid in arrangements(self.min_tiles, most) if max(grid) <= self.max_side)
        return nearest_grid(grids, height, width, self.tile)


def nearest_grid(grids: Iterable[Size], height: int, width: int, tile: Size) -> Size:
    """Return the grid (rows, columns) whose aspect ratio is nearest to the image's; (1, 1) if there are no grids.

    Of equally near ones the later grid wins if its area is less than twice the image's.
    """
    best, nearest = (1, 1), math.inf
    for rows, columns in grids:
        distance = abs(width / height - columns / rows)
        room = tile[0] * tile[1] * rows * columns
        if distance < nearest or (distance == nearest and height * width > 0.5 * room):
            best, nearest = (rows, columns), distance
    return best


@dataclass(frozen=True)
class PageTiles(AspectTiles):
    """AspectTiles with up to `dense_tiles` tiles for pages that would be shrunk too much.

    A page gets them if its tiles would be less than `dense_scale` times as wide as the page (0: always), and its ratio of width
    to height is above the first and at most the second of `dense_ratios` (0: no bound). Rule: Granite Docling.
    """

    max_side: int = 16
    dense_tiles: int = 0
    dense_scale: float = 0.0
    dense_ratios: tuple[float, float] = (0.0, 0.0)

    def arrangement(self, height: int, width: int) -> Size:
        grid = self._nearest(height, width, self.max_tiles)
        return self._nearest(height, width, self.dense_tiles) if self._is_dense(height, width, grid[1]) else grid

    def _is_dense(self, height: int, width: int, columns: int) -> bool:
        (least, most), ratio = self.dense_ratios, width / height
        if not self.dense_tiles or (self.dense_scale <= 0 and least <= 0) or (least > 0 and ratio <= least):
            return False
        if most > 0 and ratio > most:
            return False
        return self.dense_scale <= 0 or columns * self.tile[1] / width < self.dense_scale


@dataclass(frozen=True)
class ScaleTiles(AspectTiles):
    """The grid of up to `max_tiles` tiles that enlarges the image least or, if all of them shrink it, shrinks it least.

    Rule: Cohere2-Vision.
    """

    def arrangement(self, height: int, width: int) -> Size:
        grids = _grids(self.max_tiles)
        scales = (self.tile[0] * grids / np.array((height, width))).min(1)
        best = np.where(scales >= 1, scales, np.inf).argmin() if scales.max() >= 1 else scales.argmax()
        rows, columns = grids[best].tolist()
        return rows, columns


@functools.lru_cache(8)
def _grids(max_tiles: int) -> np.ndarray:
    """Return the grids of up to `max_tiles` tiles, by number of tiles, `[grids, 2]`."""
    return np.array(arrangements(1, max_tiles))


@dataclass(frozen=True)
class ClosestTiles(AspectTiles):
    """The grid whose aspect ratio is nearest, weighted by its area up to 0.6 of the image's. Rule: Llama-Nemotron-Nano-VL."""

    def arrangement(self, height: int, width: int) -> Size:
        def factor(grid: Size) -> float:
            rows, columns = grid
            shape, ratio = columns / rows, width / height
            return min(rows * columns * self.tile[0] * self.tile[1] / (height * width), 0.6) * min(shape / ratio, ratio / shape)

        return max(arrangements(self.min_tiles, self.max_tiles), key=factor)


@dataclass(frozen=True)
class PaddedAspectTiles(AspectTiles):
    """Enlarge to as many tiles as cover the image, keeping the aspect ratio, and pad right or at the bottom. Rule: Phi-4.

    An image that needs more than `max_tiles` tiles gets those of AspectTiles. `fill`: RGB of the padding.
    """

    thumbnail: bool = False
    fill: tuple[int, int, int] = (255, 255, 255)

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self.arrangement(height, width)
        canvas = tall, wide = rows * self.tile[0], columns * self.tile[1]
        along, down = wide / width, tall / height
        if along < down:
            tall = int(height * along)
        else:
            wide = int(width * down)
        if min(tall, wide) < _MIN_SIDE:
            size = f"an image of {width}x{height} would become {wide}x{tall}"
            raise InputError(f"{size} pixels, the model takes at least {_MIN_SIDE} a side; crop it")
        view = TiledView((Resize(tall, wide), CropPad.window(canvas, fill=self.fill)), rows, columns)
        return CropPlan((view,), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        rows, columns = -(-height // self.tile[0]), -(-width // self.tile[1])
        return (rows, columns) if rows * columns <= self.max_tiles else super().arrangement(height, width)


@dataclass(frozen=True)
class LargeImageTiles:
    """Resize to squares of patches with an area of `min_area` to `max_area` pixels; cut larger images with `tiles` first.

    An image is larger if its area is above `tolerance * max_area`. `tiles` None: do not cut. Rule: LFM2-VL.
    """

    patch: int
    merge: int
    min_area: int
    max_area: int
    tolerance: float
    tiles: AspectTiles | None

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        side = self.patch * self.merge
        near = [round(edge / side) * side for edge in (height, width)]
        whole = CropPlan((TiledView((Resize.to(self._fit(height, width, near)),)),))
        if self.tiles is None or math.prod(max(self.patch, edge) for edge in near) <= self.max_area * self.tolerance:
            return whole
        cut = replace(self.tiles, thumbnail=False).plan(height, width)
        return replace(cut, views=cut.views + whole.views) if self.tiles.thumbnail and cut.num_tiles > 1 else cut

    def _fit(self, height: int, width: int, near: Sequence[int]) -> Size:
        side = self.patch * self.merge
        tall, wide = (max(side, edge) for edge in near)
        if tall * wide > self.max_area:
            shrink = math.sqrt(height * width / self.max_area)
            tall, wide = (max(side, math.floor(edge / shrink / side) * side) for edge in (height, width))
        elif tall * wide < self.min_area:
            grow = math.sqrt(self.min_area / (height * width))
            tall, wide = (math.ceil(edge * grow / side) * side for edge in (height, width))
        return tall, wide


@dataclass(frozen=True)
class PaddedSquareTiles:
    """Cut images longer than a tile with `tiles`, then append the whole image, padded to a square of `square` pixels a side.

    `fill`: RGB of the padding. `tiles` None: do not cut. Rule: DeepSeek-OCR.
    """

    square: int
    fill: tuple[int, int, int]
    tiles: AspectTiles | None

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        scale = self.square / max(height, width)
        tall, wide = round(height * scale), round(width * scale)
        if min(tall, wide) < 1:
            raise InputError(f"an image of {width}x{height} would be less than a pixel wide at {self.square} pixels; crop it")
        window = CropPad(-((self.square - tall) // 2), -((self.square - wide) // 2), self.square, self.square, self.fill)
        whole = TiledView((Resize(tall, wide), window))
        if self.tiles is None or max(height, width) <= self.tiles.tile[0]:
            return CropPlan((whole,))
        rows, columns = self.tiles.arrangement(height, width)
        cut = TiledView((Resize(self.tiles.tile[0] * rows, self.tiles.tile[1] * columns),), rows, columns)
        return CropPlan((cut, whole), (rows, columns))
