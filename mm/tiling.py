"""Tiling policies: from an image's size to the tiles that the encoder sees.

A policy's `plan(height, width)` is a pure function; `processors/images.py` applies the plan to pixels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

from .errors import ConfigError, InputError

_MAX_SQUARE = 1 << 24  # pixels of a padded image
Size = tuple[int, int]
"""`(height, width)` in pixels."""


@dataclass(frozen=True)
class Resize:
    """Resize the whole image."""

    height: int
    width: int


@dataclass(frozen=True)
class CropPad:
    """Cut the window of this size at (top, left), which may reach beyond the image; `fill` (RGB) pads what is outside."""

    top: int
    left: int
    height: int
    width: int
    fill: tuple[int, int, int] = (0, 0, 0)


Step = Resize | CropPad


@dataclass(frozen=True)
class TiledView:
    """A view of an image: apply `steps` in order, then cut the result into `rows` x `columns` equal tiles, row by row."""

    steps: tuple[Step, ...]
    rows: int = 1
    columns: int = 1

    @property
    def tile_size(self) -> Size:
        """Height and width of one tile."""
        return self.steps[-1].height // self.rows, self.steps[-1].width // self.columns


@dataclass(frozen=True)
class CropPlan:
    """The views of an image, in the order in which the encoder gets their tiles.

    `tiles`: rows and columns of tiles, (0, 0) if the image is not tiled.
    """

    views: tuple[TiledView, ...]
    tiles: tuple[int, int] = (0, 0)

    @property
    def num_tiles(self) -> int:
        """Number of images that the encoder gets."""
        return sum(view.rows * view.columns for view in self.views)


class TilingPolicy(Protocol):
    """Rule by which a model tiles images; the implementations are frozen dataclasses."""

    def plan(self, height: int, width: int) -> CropPlan:
        """Return the plan for an image of this size in pixels; InputError if it is empty."""


@dataclass(frozen=True)
class FixedSize:
    """Resize to one size, whatever the aspect ratio."""

    size: Size

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        return CropPlan((TiledView((Resize(*self.size),)),))


@dataclass(frozen=True)
class CenterCrop:
    """Resize the shorter side to `shortest`, keeping the aspect ratio, then crop the center to `crop`. Rule: CLIP."""

    shortest: int
    crop: Size

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        tall, wide = self.shortest, int(self.shortest * width / height)
        if width <= height:
            tall, wide = int(self.shortest * height / width), self.shortest
        window = CropPad(_middle(tall, self.crop[0]), _middle(wide, self.crop[1]), *self.crop)
        return CropPlan((TiledView((Resize(tall, wide), window)),))


@dataclass(frozen=True)
class BoundedResize:
    """Shrink to fit into `max_size`, keeping the aspect ratio; sides are rounded up to multiples of `multiple`. Rule: Pixtral.

    `nearest`: round the shrunk sides to the nearest pixel, else floor them.
    """

    max_size: Size
    multiple: Size
    nearest: bool = False

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        ratio = max(1.0, height / self.max_size[0], width / self.max_size[1])
        if ratio > 1:
            rounded = round if self.nearest else math.floor
            height, width = rounded(height / ratio), rounded(width / ratio)
        tall, wide = (_up(max(1, side), step) for side, step in zip((height, width), self.multiple, strict=True))
        return CropPlan((TiledView((Resize(tall, wide),)),))


@dataclass(frozen=True)
class AspectTiles:
    """Resize to the grid of `min_tiles` to `max_tiles` with the nearest aspect ratio, cut the tiles, and append a thumbnail.

    If grids are equally near, a larger one wins if its area is less than twice the image's. Rule: InternVL.
    """

    tile: Size
    min_tiles: int
    max_tiles: int
    thumbnail: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles:
            tiles = f"{self.min_tiles} to {self.max_tiles} tiles"
            raise ConfigError(f"{tiles} are requested; give a maximum that is not below the minimum")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        rows, columns = self.arrangement(height, width)
        if rows * columns == 1:
            return FixedSize(self.tile).plan(height, width)
        cut = TiledView((Resize(self.tile[0] * rows, self.tile[1] * columns),), rows, columns)
        whole = (TiledView((Resize(*self.tile),)),) if self.thumbnail else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of tiles."""
        best, nearest = (1, 1), math.inf
        for rows, columns in _arrangements(self.min_tiles, self.max_tiles):
            distance = abs(width / height - columns / rows)
            room = self.tile[0] * self.tile[1] * rows * columns
            if distance < nearest or (distance == nearest and height * width > 0.5 * room):
                best, nearest = (rows, columns), distance
        return best


@dataclass(frozen=True)
class PaddedSquareTiles:
    """Cut images longer than a tile with `tiles`, then append the whole image, padded to a square of `square` pixels a side.

    `fill`: RGB of the padding. `tiles` None: do not cut. Rule: DeepSeek-OCR.
    """

    square: int
    fill: tuple[int, int, int]
    tiles: AspectTiles | None

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
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


@dataclass(frozen=True)
class PaddedSquare:
    """Pad to a square in color `fill`, then resize. Rule: LLaVA ("pad").

    An image whose square would have more than `_MAX_SQUARE` pixels is resized before it is padded.
    """

    size: Size
    fill: tuple[int, int, int]

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        first, (tall, wide) = Resize(*fit(height, width, self.size)), self.size
        if max(height, width) ** 2 > _MAX_SQUARE:
            window = CropPad(-((tall - first.height) // 2), -((wide - first.width) // 2), tall, wide, self.fill)
            return CropPlan((TiledView((first, window)),))
        side = max(height, width)
        window = CropPad(-((side - height) // 2), -((side - width) // 2), side, side, self.fill)
        return CropPlan((TiledView((window, Resize(tall, wide))),))


@dataclass(frozen=True)
class AnyResTiles:
    """The whole image at `base`, then the image centered in the best of `sizes` and cut into tiles.

    The best size keeps the most of the image's pixels, then wastes the least. Rule: LLaVA-NeXT ("anyres").
    """

    base: Size
    tile: Size
    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("the list of image sizes (image_grid_pinpoints) is empty")
        for size in self.sizes:
            if min(size) < 1 or size[0] % self.tile[0] or size[1] % self.tile[1]:
                raise ConfigError(f"the image size {size} is not a whole number of tiles of {self.tile}")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        best = self.best(height, width)
        rows, columns = best[0] // self.tile[0], best[1] // self.tile[1]
        tall, wide = fit(height, width, best)
        window = CropPad(_middle(tall, best[0]), _middle(wide, best[1]), *best)
        cut = TiledView((Resize(tall, wide), window), rows, columns)
        return CropPlan((TiledView((Resize(*self.base),)), cut), (rows, columns))

    def best(self, height: int, width: int) -> Size:
        """Return the best of `sizes` for an image of this size."""
        return max(self.sizes, key=lambda size: _anyres_score(height, width, size))


@dataclass(frozen=True)
class EdgeTiles:
    """Resize the longer side to `longest` (at most `limit`), then both up to multiples of `tile`; cut; append a thumbnail.

    `split` False: only the thumbnail. Every step resizes the result of the step before. Rule: Idefics3.
    """

    longest: int
    tile: int
    split: bool = True
    limit: int = 4096

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        first = Resize(*self.edge(height, width))
        whole = Resize(self.tile, self.tile)
        if not self.split:
            return CropPlan((TiledView((first, whole)),))
        second = Resize(*self._multiples(first.height, first.width))
        rows, columns = second.height // self.tile, second.width // self.tile
        if rows * columns == 1:
            return CropPlan((TiledView((first, second)),))
        return CropPlan((TiledView((first, second), rows, columns), TiledView((first, second, whole))), (rows, columns))

    def edge(self, height: int, width: int) -> Size:
        """Return the size after the first step. The shorter side is made even before the limit is applied."""
        ratio = width / height
        if width >= height:
            tall, wide = int(self.longest / ratio), self.longest
            tall = max(1, tall + tall % 2)
        else:
            tall, wide = self.longest, int(self.longest * ratio)
            wide = max(1, wide + wide % 2)
        tall, wide = _shrink(tall, wide, self.limit)
        return max(1, tall), max(1, wide)

    def _multiples(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            wide = _up(width, self.tile)
            return _up(int(wide / ratio), self.tile), wide
        tall = _up(height, self.tile)
        return tall, _up(int(tall * ratio), self.tile)


@dataclass(frozen=True)
class QuarterTiles:
    """Shrink the longer side to at most `longest`, keeping the aspect ratio, then stretch sides below `shortest` to it.

    `split`: the four quarters of the image come first, each resized in the same way, so views differ in size. Rule: Idefics2.
    """

    shortest: int
    longest: int
    split: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        whole = TiledView((self._resize(height, width),))
        if not self.split:
            return CropPlan((whole,))
        if min(height, width) < 2:
            raise InputError(f"an image of {width}x{height} pixels cannot be cut in quarters; pass do_image_splitting=False")
        bands, columns = (((0, side // 2), (side // 2, side - side // 2)) for side in (height, width))
        boxes = [(top, left, tall, wide) for top, tall in bands for left, wide in columns]
        quarters = (TiledView((CropPad(*box), self._resize(*box[2:]))) for box in boxes)
        return CropPlan((*quarters, whole), (2, 2))

    def _resize(self, height: int, width: int) -> Resize:
        height, width = _shrink(height, width, self.longest)
        return Resize(max(height, self.shortest), max(width, self.shortest))


@dataclass(frozen=True)
class PanAndScan:
    """The whole image at `size`; images longer than `min_ratio`:1 are also cut along their longer side into crops at `size`.

    There are 2 to `max_crops` crops of at least `min_crop` pixels a side. Rule: Gemma3.
    """

    size: Size
    min_crop: int
    max_crops: int
    min_ratio: float

    def __post_init__(self) -> None:
        if min(self.min_crop, self.max_crops) < 1:
            crops = f"{self.max_crops} crops of at least {self.min_crop} pixels"
            raise ConfigError(f"{crops} are requested; give positive numbers")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        whole = TiledView((Resize(*self.size),))
        long, short = max(height, width), min(height, width)
        count = min(self.max_crops, max(2, min(long // self.min_crop, math.floor(long / short + 0.5))))
        step = math.ceil(long / count)
        if long / short < self.min_ratio or min(step, short) < self.min_crop:
            return CropPlan((whole,))
        pieces = [(start, min(step, long - start)) for start in range(0, long, step)]
        if width >= height:
            crops = [CropPad(0, start, height, side) for start, side in pieces]
        else:
            crops = [CropPad(start, 0, side, width) for start, side in pieces]
        tiles = (1, len(crops)) if width >= height else (len(crops), 1)
        return CropPlan((whole, *(TiledView((crop, Resize(*self.size))) for crop in crops)), tiles)


def fit(height: int, width: int, target: Size) -> Size:
    """Return the largest size inside `target` with the image's aspect ratio; the side that does not reach it is rounded up."""
    down, along = target[0] / height, target[1] / width
    if along < down:
        return min(math.ceil(height * along), target[0]), target[1]
    return target[0], min(math.ceil(width * down), target[1])


def unpad(height: int, width: int, grid: Size) -> Size:
    """Return rows and columns of a grid over a padded image that remain after its padding is cut off.

    `height`, `width`: size of the image, in any unit. Both ends lose the same number of rows or columns. Rule: LLaVA-NeXT.
    """
    if width / height > grid[1] / grid[0]:
        kept = int(round(height * (grid[1] / width), 7))
        return grid[0] - (grid[0] - kept) // 2 * 2, grid[1]
    kept = int(round(width * (grid[0] / height), 7))
    return grid[0], grid[1] - (grid[1] - kept) // 2 * 2


@functools.lru_cache(64)
def _arrangements(min_tiles: int, max_tiles: int) -> tuple[Size, ...]:
    """Return all `(rows, columns)` of `min_tiles` to `max_tiles` tiles, by number of tiles and then by columns."""
    each = ((rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles // columns + 1))
    return tuple(sorted((one for one in each if one[0] * one[1] >= min_tiles), key=lambda one: one[0] * one[1]))


def _anyres_score(height: int, width: int, size: Size) -> tuple[int, int]:
    """Return `(pixels kept, -pixels wasted)` of an image in a size."""
    scale = min(size[1] / width, size[0] / height)
    effective = min(int(width * scale) * int(height * scale), width * height)
    return effective, effective - size[0] * size[1]


def _middle(side: int, crop: int) -> int:
    """Return where a centered crop starts. If the side is too short, the odd pixel of padding is at the end."""
    return int((side - crop) / 2) if side >= crop else -((crop - side) // 2)


def _shrink(height: int, width: int, longest: int) -> Size:
    """Return the size with the longer side at most `longest`. The other side is rounded down; for very thin images it is 0."""
    ratio = width / height
    if width >= height and width > longest:
        return int(longest / ratio), longest
    return (longest, int(longest * ratio)) if height > longest else (height, width)


def _up(side: int, multiple: int) -> int:
    return max(1, math.ceil(side / multiple)) * multiple


def _check(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise InputError(f"an image of {width}x{height} has no pixels")
