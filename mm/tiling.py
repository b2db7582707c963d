"""Tiling policies: from an image's size to the tiles that the encoder sees.

A policy's `plan(height, width)` is a pure function; `processors/images.py` applies the plan to pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from .errors import ConfigError, InputError

_MAX_SQUARE = 1 << 24  # pixels of a padded image
_MIN_SIDE = 10  # pixels of an image that PaddedAspectTiles resized
MAX_PACKED_FRAMES = 3  # frames of a video that become the rows of one (MiniCPM-V 4.5)
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
        check_size(height, width)
        return CropPlan((TiledView((Resize(*self.size),)),))


@dataclass(frozen=True)
class CenterCrop:
    """Resize the shorter side to `shortest`, keeping the aspect ratio, then crop the center to `crop`. Rule: CLIP."""

    shortest: int
    crop: Size

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
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
        check_size(height, width)
        ratio = max(1.0, height / self.max_size[0], width / self.max_size[1])
        if ratio > 1:
            rounded = round if self.nearest else math.floor
            height, width = rounded(height / ratio), rounded(width / ratio)
        tall, wide = (_up(max(1, side), step) for side, step in zip((height, width), self.multiple, strict=True))
        return CropPlan((TiledView((Resize(tall, wide),)),))


@dataclass(frozen=True)
class PatchLimit:
    """Scale to at most `max_patches` patches; sides are rounded up to multiples of `patch` pixels. Rule: SigLIP 2 (NaFlex)."""

    patch: int
    max_patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        least, most = 1e-6, 100.0  # bounds and precision of the published search
        while most - least >= 1e-5:
            scale = (least + most) / 2
            tall, wide = (_up(side * scale, self.patch) for side in (height, width))
            fits = (tall // self.patch) * (wide // self.patch) <= self.max_patches
            least, most = (scale, most) if fits else (least, scale)
        return CropPlan((TiledView((Resize(_up(height * least, self.patch), _up(width * least, self.patch)),)),))


@dataclass(frozen=True)
class BoundedPatches:
    """Scale to between `min_patches` and `max_patches` patches of `patch` pixels, if that is possible. Rule: Isaac.

    Sides are rounded up to multiples of `multiple` pixels. Images are enlarged at most 100 times.
    """

    patch: int
    multiple: int
    min_patches: int
    max_patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        scale, count = 1.0, self._patches(height, width, 1.0)
        if count < self.min_patches:
            scale = self._search(1.0, 100.0, lambda one: self._patches(height, width, one) < self.min_patches)[1]
        elif count > self.max_patches:
            scale = self._search(1e-6, 1.0, lambda one: self._patches(height, width, one) <= self.max_patches)[0]
        return CropPlan((TiledView((Resize(_up(height * scale, self.multiple), _up(width * scale, self.multiple)),)),))

    def _patches(self, height: int, width: int, scale: float) -> int:
        tall, wide = (_up(side * scale, self.multiple) // self.patch for side in (height, width))
        return tall * wide

    def _search(self, least: float, most: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
        """Return two scales, of which only the first is low, with the precision of the published search."""
        while most - least >= 1e-5:
            scale = (least + most) / 2
            least, most = (scale, most) if is_low(scale) else (least, scale)
        return least, most


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
        whole = (TiledView((Resize(*self.tile),)),) if self.thumbnail else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of tiles."""
        return self._nearest(height, width, self.max_tiles)

    def _nearest(self, height: int, width: int, most: int) -> Size:
        best, nearest = (1, 1), math.inf
        for rows, columns in arrangements(self.min_tiles, most):
            if max(rows, columns) > self.max_side:
                continue
            distance = abs(width / height - columns / rows)
            room = self.tile[0] * self.tile[1] * rows * columns
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
        scales = {
            (rows, columns): min(self.tile[0] * columns / width, self.tile[0] * rows / height)
            for rows, columns in arrangements(1, self.max_tiles)
        }
        enough = [grid for grid, scale in scales.items() if scale >= 1]
        return min(enough, key=lambda grid: scales[grid]) if enough else max(scales, key=lambda grid: scales[grid])


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
class PatchRange:
    """Resize to a grid of `min_patches` to `max_patches` patches near the image's own; its sides are multiples of `multiple`.

    Rule: Nemotron-Nano-VL.
    """

    patch: int
    multiple: int
    min_patches: int
    max_patches: int

    def __post_init__(self) -> None:
        if self.max_patches < 2 * self.min_patches:  # so that no rounding makes less than `min_patches`
            limits = f"{self.min_patches} to {self.max_patches} patches"
            raise ConfigError(f"images of {limits} are requested; give a maximum of at least {2 * self.min_patches}")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        tall, wide = (round(side / self.patch + 0.5) for side in (height, width))
        factor = min(math.sqrt(self.max_patches / (tall * wide)), 1.0)
        tall, wide = math.floor(factor * tall), math.floor(factor * wide)
        if not tall * wide:
            raise InputError(f"its sides {width}x{height} differ too much for {self.max_patches:,} patches; crop it first")
        if tall * wide < self.min_patches:
            factor = math.sqrt(self.min_patches / (tall * wide))
            tall, wide = math.ceil(factor * tall), math.ceil(factor * wide)
        tall = self._rounded(tall, wide)
        wide = self._rounded(wide, tall)
        return CropPlan((TiledView((Resize(tall * self.patch, wide * self.patch),)),))

    def _rounded(self, side: int, other: int) -> int:
        """Round a side up to a multiple if the grid stays within the maximum, else down."""
        up = -(-side // self.multiple) * self.multiple
        return up if up == side or up * other <= self.max_patches else max(self.multiple, up - self.multiple)


@dataclass(frozen=True)
class PatchTarget:
    """Resize to about `patches` patches, keeping the aspect ratio; sides are multiples of `multiple` patches.

    Rule: Nemotron-Nano-VL, for frames of videos.
    """

    patch: int
    multiple: int
    patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        grid = [max(round(math.sqrt(ratio)), 1) for ratio in (self.patches * height / width, self.patches * width / height)]
        up = [-(-side // self.multiple) * self.multiple for side in grid]
        down = [max(self.multiple, side // self.multiple * self.multiple) for side in grid]
        tall, wide = up if up[0] * up[1] <= self.patches else down
        return CropPlan((TiledView((Resize(tall * self.patch, wide * self.patch),)),))


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
        view = TiledView((Resize(tall, wide), CropPad(0, 0, *canvas, self.fill)), rows, columns)
        return CropPlan((view,), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        rows, columns = -(-height // self.tile[0]), -(-width // self.tile[1])
        return (rows, columns) if rows * columns <= self.max_tiles else super().arrangement(height, width)


@dataclass(frozen=True)
class LongSideTiles:
    """Resize the longer side to as many tiles as possible with at most `max_tiles` in all, and pad both ends of the other.

    `fill`: RGB of the padding. Rule: Phi-3-vision.
    """

    tile: int
    max_tiles: int
    fill: tuple[int, int, int] = (255, 255, 255)

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        if width < height:
            (view,) = self.plan(width, height).views
            resized, canvas = view.steps
            steps = (
                Resize(resized.width, resized.height),
                CropPad(0, -self._before(resized.height), canvas.width, canvas.height, self.fill),
            )
            return CropPlan((TiledView(steps, view.columns, view.rows),), (view.columns, view.rows))
        ratio, columns = width / height, 1
        while columns * math.ceil(columns / ratio) <= self.max_tiles:
            columns += 1
        columns -= 1
        wide = columns * self.tile
        tall = int(wide / ratio)
        if tall < 1:
            raise InputError(f"an image of {width}x{height} would be less than a pixel high at {wide} pixels; crop it")
        rows = -(-tall // self.tile)
        steps = Resize(tall, wide), CropPad(-self._before(tall), 0, rows * self.tile, wide, self.fill)
        return CropPlan((TiledView(steps, rows, columns),), (rows, columns))

    def _before(self, side: int) -> int:
        """Return the pixels of padding before a side."""
        return -side % self.tile // 2


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
        whole = CropPlan((TiledView((Resize(*self._fit(height, width, near)),)),))
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
        best = max(self.sizes, key=lambda size: _anyres_score(height, width, size))
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
        window = CropPad(-round((size[0] - tall) * 0.5), -round((size[1] - wide) * 0.5), *size, self.fill)
        return Resize(tall, wide), window


@dataclass(frozen=True)
class PaddedPage:
    """Shrink to fit into `size`, keeping the aspect ratio, and put the image in the middle of a page of that size.

    Rule: Nemotron-Parse. Smaller images keep their size.
    """

    size: Size
    fill: tuple[int, int, int] = (255, 255, 255)

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        tall, wide, ratio = height, width, width / height
        if tall > self.size[0]:
            tall, wide = self.size[0], int(self.size[0] * ratio)
        if wide > self.size[1]:
            tall, wide = int(self.size[1] / ratio), self.size[1]
        if not tall * wide:
            raise InputError(f"its sides {width}x{height} differ too much for a page; crop it first")
        window = CropPad(-((self.size[0] - tall) // 2), -((self.size[1] - wide) // 2), *self.size, self.fill)
        return CropPlan((TiledView((Resize(tall, wide), window)),))


@dataclass(frozen=True)
class PaddedSquare:
    """Pad to a square in color `fill`, then resize. Rule: LLaVA ("pad").

    An image whose square would have more than `_MAX_SQUARE` pixels is resized before it is padded.
    """

    size: Size
    fill: tuple[int, int, int]

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
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

    `floor`: the side that does not reach the size is rounded down instead of up. Rule: MiniMax-VL-01.
    """

    base: Size
    tile: Size
    sizes: tuple[Size, ...]
    floor: bool = False

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
        tall, wide = fit(height, width, best, self.floor)
        window = CropPad(_middle(tall, best[0]), _middle(wide, best[1]), *best)
        cut = TiledView((Resize(tall, wide), window), rows, columns)
        return CropPlan((TiledView((Resize(*self.base),)), cut), (rows, columns))

    def best(self, height: int, width: int) -> Size:
        """Return the best of `sizes` for an image of this size."""
        return max(self.sizes, key=lambda size: _anyres_score(height, width, size))


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
        cut = TiledView((Resize(tall, wide), CropPad(0, 0, *canvas)), rows, columns)
        whole = (TiledView((Resize(self.tile, self.tile),)),) if self.thumbnail and rows * columns > 1 else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of the best canvas."""
        grids = _grids_by_ratio(self.max_tiles) if self.by_ratio else grids_by_rows(self.max_tiles)
        sides = np.array(grids, dtype=np.float32 if self.by_ratio else np.float64) * self.tile
        scales = (sides / np.array((height, width), dtype=sides.dtype)).min(1)
        larger = scales[scales >= 1]
        best = scales.max() if not len(larger) else larger.max() if self.enlarge else larger.min()
        return min(
            (grid for grid, scale in zip(grids, scales, strict=True) if scale == best), key=lambda grid: grid[0] * grid[1]
        )


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
        check_size(height, width)
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
        check_size(height, width)
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
class LongEdge:
    """Resize the longer side to `longest`, the other to at least `shortest`, and pad both to whole patches. Rule: Aria.

    `sizes`: the image is first centered in the best of these sizes and cut into crops of `longest` a side, and each crop is
    resized in this way. Empty: do not cut.
    """

    longest: int
    shortest: int
    patch: int
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"sides of {self.shortest} to {self.longest} pixels are requested; give a larger maximum")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        if not self.sizes:
            return CropPlan((TiledView(self._fit(height, width)),))
        tall, wide = max(self.sizes, key=lambda size: _anyres_score(height, width, size))
        first, side = Resize(*fit(height, width, (tall, wide))), self.longest
        window = CropPad(_middle(first.height, tall), _middle(first.width, wide), tall, wide)
        tops, lefts = range(0, tall, side), range(0, wide, side)
        crops = [CropPad(top, left, min(side, tall - top), min(side, wide - left)) for top in tops for left in lefts]
        views = (TiledView((first, window, crop, *self._fit(crop.height, crop.width))) for crop in crops)
        return CropPlan(tuple(views), (len(tops), len(lefts)))

    def _fit(self, height: int, width: int) -> tuple[Step, Step]:
        scale = self.longest / max(height, width)
        short = max(int(min(height, width) * scale), self.shortest)
        tall, wide = (short, self.longest) if width >= height else (self.longest, short)
        return Resize(tall, wide), CropPad(0, 0, _up(tall, self.patch), _up(wide, self.patch))


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
        check_size(height, width)
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


@dataclass(frozen=True)
class CoveringTiles:
    """The whole image, then the fewest tiles, at most `max_tiles`, that show more than 9/10 of it undiminished. Rule: Ovis2.

    All are squares of `side` pixels. If no arrangement shows as much, the one that shows most is taken. As in transformers,
    rows and columns are exchanged when arrangements are compared.
    """

    side: int
    max_tiles: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self._arrangement(height, width, [grid[::-1] for grid in arrangements(1, self.max_tiles)])[::-1]
        whole = TiledView((Resize(self.side, self.side),))
        if rows * columns == 1:
            return CropPlan((whole,))
        return CropPlan((whole, TiledView((Resize(self.side * rows, self.side * columns),), rows, columns)), (rows, columns))

    def _arrangement(self, height: int, width: int, grids: Sequence[Size]) -> Size:
        """Return the rows and columns of the best of these arrangements; of equally good ones, the first."""
        shares = [(self._shown(height, width, grid), grid) for grid in grids]
        enough = [(grid[0] * grid[1], -shown, grid) for shown, grid in shares if shown > 0.9]
        most = [(-shown, grid[0] * grid[1], grid) for shown, grid in shares]
        return min(enough or most, key=lambda one: one[:2])[2]

    def _shown(self, height: int, width: int, grid: Size) -> float:
        """Return the part of the image's area that is left if each tile's longer side is shrunk to `side`."""
        rows, columns = grid
        tall, wide = height // rows, width // columns
        low, right = height - tall * (rows - 1), width - wide * (columns - 1)
        line = [self._area(tall, wide)] * (columns - 1) + [self._area(tall, right)]
        last = [self._area(low, wide)] * (columns - 1) + [self._area(low, right)]
        return sum(line * (rows - 1) + last) / (height * width)

    def _area(self, height: int, width: int) -> float:
        long, short = max(height, width), min(height, width)
        return short / long * self.side * self.side if long > self.side else long * short


@dataclass(frozen=True)
class PaddedCoveringTiles(CoveringTiles):
    """The whole image, then the tiles of CoveringTiles, each with its aspect ratio and padded to a square. Rule: Ovis.

    The last row and the last column of tiles take the pixels that are left over. `cut`: False if only the whole image is taken.
    """

    cut: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self._arrangement(height, width, grids_by_rows(self.max_tiles)) if self.cut else (1, 1)
        views = [self._padded(0, 0, height, width)]
        if rows * columns == 1:
            return CropPlan(tuple(views))
        tall, wide = height // rows, width // columns
        for row in range(rows):
            for column in range(columns):
                bottom = height if row == rows - 1 else (row + 1) * tall
                right = width if column == columns - 1 else (column + 1) * wide
                views.append(self._padded(row * tall, column * wide, bottom - row * tall, right - column * wide))
        return CropPlan(tuple(views), (rows, columns))

    def _padded(self, top: int, left: int, height: int, width: int) -> TiledView:
        """Cut, resize the longer side to `side`, and center."""
        tall = wide = self.side
        if height and width > height:
            tall = int(height / width * self.side)
        elif width and height > width:
            wide = int(width / height * self.side)
        if not min(tall, wide, height, width):
            raise InputError(f"a part of {width}x{height} pixels cannot be resized to {self.side} pixels; crop the image first")
        window = CropPad(-((self.side - tall) // 2), -((self.side - wide) // 2), self.side, self.side)
        return TiledView((CropPad(top, left, height, width), Resize(tall, wide), window))


@dataclass(frozen=True)
class SliceTiles:
    """The whole image, then a grid of at most `max_slices` slices with the nearest aspect ratio. Rule: MiniCPM-V.

    The whole image and each slice get about `side` x `side` pixels, in multiples of `multiple` pixels a side. An image of at
    most that area is not cut.
    """

    side: int
    multiple: int
    max_slices: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        grid = self.arrangement(height, width)
        if grid is None:
            return CropPlan((TiledView((Resize(*self._resized(height, width, True)),)),))
        whole = TiledView((Resize(*self._resized(height, width, False)),))
        tall, wide = (_nearest(side, parts) / parts for side, parts in zip((height, width), grid, strict=True))
        slice_size = self._resized(tall, wide, True)
        cut = TiledView((Resize(slice_size[0] * grid[0], slice_size[1] * grid[1]),), *grid)
        return CropPlan((whole, cut), grid)

    def arrangement(self, height: int, width: int) -> Size | None:
        """Return rows and columns of slices; None if the image is not cut."""
        count = min(math.ceil(width * height / self.side**2), self.max_slices)
        if count <= 1:
            return None
        counts = [one for one in (count - 1, count, count + 1) if 1 < one <= self.max_slices]
        grids = [(rows, one // rows) for one in counts for rows in range(1, one + 1) if one % rows == 0]
        ratio = math.log(width / height)
        return min(grids, key=lambda grid: (abs(ratio - math.log(grid[1] / grid[0])), -grid[0]))

    def most_patches(self, patch: int) -> int:
        """Return the limit on the patches of a view for models that make any view the same number of rows."""
        return 5 * (self.side // patch) ** 2 // 4

    def _resized(self, height: float, width: float, enlarge: bool) -> Size:
        if enlarge or height * width > self.side**2:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        return _nearest(height, self.multiple), _nearest(width, self.multiple)


@dataclass(frozen=True)
class WindowTiles:
    """Cut into square windows, row by row, then append the whole image, which the caller resizes to `side`. Rule: Step3-VL.

    A longer side of less than `side` is cut only if it is over 1.5 times the other one, in windows as wide as that one. Other
    images have windows of `window` pixels, or as wide as the shorter side if that is less and the ratio is over 4. Both sides
    are resized to whole windows; a side below one window is padded in black at its end.

    Args:
        longest: longer sides are shrunk to this first.
        cut: False: the whole image alone.
    """

    side: int
    window: int
    longest: int
    cut: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        steps = self._first_steps(height, width)
        tall, wide = steps[-1].height, steps[-1].width
        size = self._window(max(tall, wide), min(tall, wide)) if self.cut else 0
        if not size:
            return CropPlan((TiledView(steps),))
        resized = Resize(*(_whole_windows(side, size) for side in (tall, wide)))
        rows, columns = max(1, resized.height // size), max(1, resized.width // size)
        padded = CropPad(0, 0, rows * size, columns * size)
        return CropPlan((TiledView((*steps, resized, padded), rows, columns), TiledView(steps)), (rows, columns))

    def _first_steps(self, height: int, width: int) -> tuple[Step, ...]:
        """Limit the longer side. Slivers are padded to squares; those that are shrunk are padded afterwards, to save memory."""
        long, short = max(height, width), min(height, width)
        scale = min(1.0, self.longest / long)
        shrunk = Resize(max(1, int(height * scale)), max(1, int(width * scale)))
        if short >= 32 or long / short <= 4:
            return (shrunk,)
        return shrunk, CropPad(0, 0, int(long * scale), int(long * scale))

    def _window(self, long: int, short: int) -> int:
        """Return the side of a window; 0: the image is not cut."""
        if long < self.side:
            return short if long / short > 1.5 else 0
        return min(short, self.window) if long / short > 4 else self.window


def _whole_windows(side: int, window: int) -> int:
    """Return the nearest multiple of the window; over a fifth of a window counts as one more. Shorter sides stay."""
    if side < window:
        return side
    count = side // window
    return window * (count + (side / window - count > 0.2))


def fit(height: int, width: int, target: Size, floor: bool = False) -> Size:
    """Return the largest size inside `target` with the image's aspect ratio; the side that does not reach it is rounded up.

    `floor`: it is rounded down, but not to 0.
    """
    if floor:
        if width / height > target[1] / target[0]:
            return max(1, int(target[1] * height / width)), target[1]
        return target[0], max(1, int(target[0] * width / height))
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
def arrangements(min_tiles: int, max_tiles: int) -> tuple[Size, ...]:
    """Return all `(rows, columns)` of `min_tiles` to `max_tiles` tiles, by number of tiles and then by columns."""
    each = ((rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles // columns + 1))
    return tuple(sorted((one for one in each if one[0] * one[1] >= min_tiles), key=lambda one: one[0] * one[1]))


@functools.lru_cache(64)
def _grids_by_ratio(max_tiles: int) -> tuple[Size, ...]:
    """Return all (rows, columns) of at most `max_tiles` tiles, from most tiles on, each followed by those of equal ratio."""
    every = [(rows, count // rows) for count in range(max_tiles, 0, -1) for rows in range(1, count + 1) if count % rows == 0]
    ratios = {rows / columns: None for rows, columns in every}
    return tuple(grid for ratio in ratios for grid in every if grid[0] / grid[1] == ratio)


@functools.lru_cache(64)
def grids_by_rows(max_tiles: int) -> tuple[Size, ...]:
    """Return all (rows, columns) of at most `max_tiles` tiles, by rows and then by columns."""
    return tuple((rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles // rows + 1))


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


def _nearest(side: float, multiple: int) -> int:
    return max(1, round(side / multiple)) * multiple


def _up(side: float, multiple: int) -> int:
    return max(1, math.ceil(side / multiple)) * multiple


def check_size(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise InputError(f"an image of {width}x{height} has no pixels")
