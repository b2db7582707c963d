"""Policies that place the image on the best of several canvases and cut that into tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ...callers.errors import ConfigError, InputError
from .plan import CropPad, CropPlan, Resize, Size, Step, TiledView
from .sizes import anyres_score, check_size, fit, grids_by_ratio, grids_by_rows, middle


@dataclass(frozen=True)
class AnyResTiles:
    """The whole image at `base`, then the image centered in the best of `sizes` and cut into tiles.

    The best size keeps the most of the image's pixels, then wastes the least. Rule: LLaVA-NeXT ("anyres").

    `floor`: the side that does not reach the size is rounded down instead of up. Rule: MiniMax-VL-01.
    `stretch`: the image fills the size, with another aspect ratio. Rule: MinerU 2.0.
    """

    base: Size
    tile: Size
    sizes: tuple[Size, ...]
    floor: bool = False
    stretch: bool = False

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("the list of image sizes (image_grid_pinpoints) is empty")
        for size in self.sizes:
            if min(size) < 1 or size[0] % self.tile[0] or size[1] % self.tile[1]:
                raise ConfigError(f"the image size {size} is not a whole number of tiles of {self.tile}")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        best = self.best(height, width)
        rows, columns = best[0] // self.tile[0], best[1] // self.tile[1]
        tall, wide = best if self.stretch else fit(height, width, best, self.floor)
        window = CropPad.window(best, middle(tall, best[0]), middle(wide, best[1]))
        cut = TiledView((Resize(tall, wide), window), rows, columns)
        return CropPlan((TiledView((Resize.to(self.base),)), cut), (rows, columns))

    def best(self, height: int, width: int) -> Size:
        """Return the best of `sizes` for an image of this size."""
        return max(self.sizes, key=lambda size: anyres_score(height, width, size))


@dataclass(frozen=True)
class PaddedTiles:
    """The whole image padded to a square of `tile` pixels a side, then padded to the best of `sizes` and cut into tiles.

    `fill`: RGB of the padding. Rule: DeepSeek-VL2, which pads with Pillow's ImageOps.pad.
    """

    tile: int
    sizes: tuple[Size, ...]
    fill: tuple[int, int, int]

    def __post_init__(self) -> None:
        for size in self.sizes:
            if min(size) < 1 or size[0] % self.tile or size[1] % self.tile:
                raise ConfigError(f"the image size {size} is not a whole number of tiles of {self.tile}; give multiples")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        best = max(self.sizes, key=lambda size: anyres_score(height, width, size))
        rows, columns = best[0] // self.tile, best[1] // self.tile
        whole = TiledView(self._padded(height, width, (self.tile, self.tile)))
        return CropPlan((whole, TiledView(self._padded(height, width, best), rows, columns)), (rows, columns))

    def _padded(self, height: int, width: int, size: Size) -> tuple[Step, Step]:
        tall, wide = size
        if width / height > size[1] / size[0]:
            tall = round(height / width * size[1])
        elif width / height < size[1] / size[0]:
            wide = round(width / height * size[0])
        if min(tall, wide) < 1:
            raise InputError(f"an image of {width}x{height} would be less than a pixel wide at {size[1]}x{size[0]}; crop it")
        window = CropPad.window(size, -round((size[0] - tall) * 0.5), -round((size[1] - wide) * 0.5), self.fill)
        return Resize(tall, wide), window


@dataclass(frozen=True)
class CanvasTiles:
    """Fit the image into the upper left corner of the best canvas of at most `max_tiles` tiles, keeping the aspect ratio.

    The best canvas enlarges the image the least or, if all of them shrink it, shrinks it the least; of equal ones it is the
    smallest. Rules: Llama 4 and Mllama.

    Args:
        tile: side of a tile.
        enlarge: images are enlarged to fill the canvas, otherwise at most to the size of a tile. The best canvas is then the
            one that enlarges the most.
        thumbnail: append the whole image, stretched to a tile, if there are several tiles.
        by_ratio: canvases are compared in float32, those of equal aspect ratio one after another; otherwise in float64.
    """

    tile: int
    max_tiles: int
    enlarge: bool = False
    thumbnail: bool = True
    by_ratio: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self.arrangement(height, width)
        tall, wide = canvas = rows * self.tile, columns * self.tile
        if not self.enlarge:
            tall, wide = min(max(height, self.tile), tall), min(max(width, self.tile), wide)
        down, along = tall / height, wide / width
        if along < down:
            tall = max(1, min(math.floor(height * along), tall))
        else:
            wide = max(1, min(math.floor(width * down), wide))
        cut = TiledView((Resize(tall, wide), CropPad.window(canvas)), rows, columns)
        whole = (TiledView((Resize(self.tile, self.tile),)),) if self.thumbnail and rows * columns > 1 else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of the best canvas."""
        grids = _grids(self.max_tiles, self.by_ratio)
        sides = grids.astype(np.float32 if self.by_ratio else np.float64) * self.tile
        scales = (sides / np.array((height, width), dtype=sides.dtype)).min(1)
        larger = scales[scales >= 1]
        best = scales.max() if not len(larger) else larger.max() if self.enlarge else larger.min()
        equal = grids[scales == best]
        rows, columns = equal[equal.prod(1).argmin()].tolist()
        return rows, columns


@functools.lru_cache(8)
def _grids(max_tiles: int, by_ratio: bool) -> np.ndarray:
    """Return the canvases in the order in which they are compared, `[canvases, 2]`."""
    return np.array(grids_by_ratio(max_tiles) if by_ratio else grids_by_rows(max_tiles))
