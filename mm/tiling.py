"""From a size to the pieces a picture is cut into: one tiler, a policy for each way. Knows no pixels, no family and no model.

A policy's `plan(height, width)` is a pure function; `processors/pictures.py` does to pixels what the plan says.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

from .errors import ConfigError, InputError

Size = tuple[int, int]
"""`(height, width)` in pixels."""


@dataclass(frozen=True)
class Resize:
    """The whole picture at another size."""

    height: int
    width: int


@dataclass(frozen=True)
class Window:
    """What is seen of the plane that the picture lies on from (0, 0): a crop, a filled margin (`fill`, RGB), or both."""

    top: int
    left: int
    height: int
    width: int
    fill: tuple[int, int, int] = (0, 0, 0)


Step = Resize | Window


@dataclass(frozen=True)
class View:
    """One way of looking at a picture: `steps` in their order, then cut into `rows` x `columns` equal pieces, row by row."""

    steps: tuple[Step, ...]
    rows: int = 1
    columns: int = 1

    @property
    def piece(self) -> Size:
        """Of one piece."""
        return self.steps[-1].height // self.rows, self.steps[-1].width // self.columns


@dataclass(frozen=True)
class CropPlan:
    """The views of one picture in the order in which the encoder sees their pieces.

    `tiles`: rows and columns of crops, (0, 0) where the picture is seen as one.
    """

    views: tuple[View, ...]
    tiles: tuple[int, int] = (0, 0)

    @property
    def pieces(self) -> int:
        """Pictures that the encoder sees."""
        return sum(view.rows * view.columns for view in self.views)


class Tiling(Protocol):
    """How a family cuts pictures. Frozen data."""

    def plan(self, height: int, width: int) -> CropPlan:
        """Of a picture of this size in pixels; InputError when it is empty."""


@dataclass(frozen=True)
class Fixed:
    """Every picture becomes one of the same size, its shape not kept."""

    size: Size

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        return CropPlan((View((Resize(*self.size),)),))


@dataclass(frozen=True)
class Centre:
    """The shorter side becomes `shortest`, its shape kept; then the middle of it of size `crop`. Rule: CLIP."""

    shortest: int
    crop: Size

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        tall, wide = self.shortest, int(self.shortest * width / height)
        if width <= height:
            tall, wide = int(self.shortest * height / width), self.shortest
        window = Window(_middle(tall, self.crop[0]), _middle(wide, self.crop[1]), *self.crop)
        return CropPlan((View((Resize(tall, wide), window)),))


@dataclass(frozen=True)
class Bounded:
    """Shrunk to fit `most`, its shape kept, never enlarged; sides grow to multiples of `multiple`. Rule: Pixtral.

    `nearest`: a shrunk side is rounded to the nearest pixel, else floored.
    """

    most: Size
    multiple: Size
    nearest: bool = False

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        ratio = max(1.0, height / self.most[0], width / self.most[1])
        if ratio > 1:
            rounded = round if self.nearest else math.floor
            height, width = rounded(height / ratio), rounded(width / ratio)
        tall, wide = (_up(max(1, side), step) for side, step in zip((height, width), self.multiple, strict=True))
        return CropPlan((View((Resize(tall, wide),)),))


@dataclass(frozen=True)
class AspectTiles:
    """Resized to the arrangement of `least` to `most` tiles nearest to its shape; cut; the whole in one tile comes last.

    Of arrangements equally near the later, larger one wins while it is less than twice the picture's area. Rule: InternVL.
    """

    tile: Size
    least: int
    most: int
    thumbnail: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"between {self.least} and {self.most} tiles are asked for; they must be in order, from 1")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        rows, columns = self.arrangement(height, width)
        if rows * columns == 1:
            return Fixed(self.tile).plan(height, width)
        cut = View((Resize(self.tile[0] * rows, self.tile[1] * columns),), rows, columns)
        whole = (View((Resize(*self.tile),)),) if self.thumbnail else ()
        return CropPlan((cut, *whole), (rows, columns))

    def arrangement(self, height: int, width: int) -> Size:
        """Rows and columns."""
        best, nearest = (1, 1), math.inf
        for rows, columns in _arrangements(self.least, self.most):
            distance = abs(width / height - columns / rows)
            room = self.tile[0] * self.tile[1] * rows * columns
            if distance < nearest or (distance == nearest and height * width > 0.5 * room):
                best, nearest = (rows, columns), distance
        return best


@dataclass(frozen=True)
class SquareAndTiles:
    """The whole in the middle of a square of `square` pixels comes last; a picture longer than a tile is also cut by `tiles`.

    `fill`: of the square's margins, RGB. `tiles` None: nothing is cut. Rule: DeepSeek-OCR.
    """

    square: int
    fill: tuple[int, int, int]
    tiles: AspectTiles | None

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        scale = self.square / max(height, width)
        tall, wide = round(height * scale), round(width * scale)
        if min(tall, wide) < 1:
            raise InputError(f"a picture of {width}x{height} is no pixel wide at {self.square} pixels; cut it")
        window = Window(-((self.square - tall) // 2), -((self.square - wide) // 2), self.square, self.square, self.fill)
        whole = View((Resize(tall, wide), window))
        if self.tiles is None or max(height, width) <= self.tiles.tile[0]:
            return CropPlan((whole,))
        rows, columns = self.tiles.arrangement(height, width)
        cut = View((Resize(self.tiles.tile[0] * rows, self.tiles.tile[1] * columns),), rows, columns)
        return CropPlan((cut, whole), (rows, columns))


@dataclass(frozen=True)
class Pinpoints:
    """The whole at `base` comes first; then the picture, its shape kept, in the middle of the best of `sizes`, cut in tiles.

    The best one leaves most of the picture's pixels, then wastes least. Rule: LLaVA-NeXT ("anyres").
    """

    base: Size
    tile: Size
    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError("the list of sizes that pictures are fitted to is empty")
        for size in self.sizes:
            if min(size) < 1 or size[0] % self.tile[0] or size[1] % self.tile[1]:
                raise ConfigError(f"pictures are fitted to {size}, which is not a whole number of tiles of {self.tile}")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        best = self.best(height, width)
        rows, columns = best[0] // self.tile[0], best[1] // self.tile[1]
        tall, wide = fit(height, width, best)
        window = Window(_middle(tall, best[0]), _middle(wide, best[1]), *best)
        cut = View((Resize(tall, wide), window), rows, columns)
        return CropPlan((View((Resize(*self.base),)), cut), (rows, columns))

    def best(self, height: int, width: int) -> Size:
        """The one of `sizes` that serves a picture of this size best."""
        return max(self.sizes, key=lambda size: _service(height, width, size))


@dataclass(frozen=True)
class EdgeTiles:
    """The longer side becomes `longest` at most `limit`, sides grow to multiples of `tile`; cut; the whole in one tile last.

    `split` false: the whole in one tile only. Every step resizes what the one before made. Rule: Idefics3.
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
            return CropPlan((View((first, whole)),))
        second = Resize(*self._multiples(first.height, first.width))
        rows, columns = second.height // self.tile, second.width // self.tile
        if rows * columns == 1:
            return CropPlan((View((first, second)),))
        return CropPlan((View((first, second), rows, columns), View((first, second, whole))), (rows, columns))

    def edge(self, height: int, width: int) -> Size:
        """The size after the first step; the shorter side is even before the limit is laid on it."""
        ratio = width / height
        if width >= height:
            tall, wide = int(self.longest / ratio), self.longest
            tall = max(1, tall + tall % 2)
        else:
            tall, wide = self.longest, int(self.longest * ratio)
            wide = max(1, wide + wide % 2)
        ratio = wide / tall
        if wide >= tall and wide > self.limit:
            return max(1, int(self.limit / ratio)), self.limit
        if tall > wide and tall > self.limit:
            return self.limit, max(1, int(self.limit * ratio))
        return tall, wide

    def _multiples(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            wide = _up(width, self.tile)
            return _up(int(wide / ratio), self.tile), wide
        tall = _up(height, self.tile)
        return tall, _up(int(tall * ratio), self.tile)


@dataclass(frozen=True)
class PanAndScan:
    """The whole at `size` comes first; a picture longer than `ratio`:1 is also cut along its longer side, each crop at `size`.

    There are 2 to `most` crops of `least` pixels or more a side. Rule: Gemma3.
    """

    size: Size
    least: int
    most: int
    ratio: float

    def __post_init__(self) -> None:
        if min(self.least, self.most) < 1:
            raise ConfigError(f"at most {self.most} crops of {self.least} pixels or more are asked for; both must be positive")

    def plan(self, height: int, width: int) -> CropPlan:
        _check(height, width)
        whole = View((Resize(*self.size),))
        long, short = max(height, width), min(height, width)
        count = min(self.most, max(2, min(long // self.least, math.floor(long / short + 0.5))))
        step = math.ceil(long / count)
        if long / short < self.ratio or min(step, short) < self.least:
            return CropPlan((whole,))
        pieces = [(start, min(step, long - start)) for start in range(0, long, step)]
        if width >= height:
            crops = [Window(0, start, height, side) for start, side in pieces]
        else:
            crops = [Window(start, 0, side, width) for start, side in pieces]
        tiles = (1, len(crops)) if width >= height else (len(crops), 1)
        return CropPlan((whole, *(View((crop, Resize(*self.size))) for crop in crops)), tiles)


def fit(height: int, width: int, target: Size) -> Size:
    """The largest size of the picture's shape inside `target`, its free side rounded up."""
    down, along = target[0] / height, target[1] / width
    if along < down:
        return min(math.ceil(height * along), target[0]), target[1]
    return target[0], min(math.ceil(width * down), target[1])


def unpadded(height: int, width: int, grid: Size) -> Size:
    """Rows and columns of a grid laid over a filled-up picture that are left when its margins are cut off again.

    `height`, `width`: of the picture, in any unit; margins have the same number of rows on both sides. Rule: LLaVA-NeXT.
    """
    if width / height > grid[1] / grid[0]:
        kept = int(round(height * (grid[1] / width), 7))
        return grid[0] - (grid[0] - kept) // 2 * 2, grid[1]
    kept = int(round(width * (grid[0] / height), 7))
    return grid[0], grid[1] - (grid[1] - kept) // 2 * 2


@functools.lru_cache(64)
def _arrangements(least: int, most: int) -> tuple[Size, ...]:
    """All `(rows, columns)` of so many tiles, few tiles first, then narrow ones."""
    each = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted((one for one in each if one[0] * one[1] >= least), key=lambda one: one[0] * one[1]))


def _service(height: int, width: int, size: Size) -> tuple[int, int]:
    scale = min(size[1] / width, size[0] / height)
    effective = min(int(width * scale) * int(height * scale), width * height)
    return effective, effective - size[0] * size[1]


def _middle(side: int, crop: int) -> int:
    """Where a crop starts; margins of a side that is too short have their odd pixel at the end."""
    return int((side - crop) / 2) if side >= crop else -((crop - side) // 2)


def _up(side: int, multiple: int) -> int:
    return max(1, math.ceil(side / multiple)) * multiple


def _check(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise InputError(f"a picture of {width}x{height} has no pixels")
