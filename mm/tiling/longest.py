"""Policies that bring the image's longer side to a size and cut what results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...callers.errors import ConfigError, InputError
from .plan import CropPad, CropPlan, Resize, Size, Step, TiledView
from .sizes import anyres_score, check_size, fit, middle, round_up, shrink


@dataclass(frozen=True)
class EdgeTiles:
    """Resize the longer side to `longest` (at most `limit`), then both up to multiples of `tile`; cut; append a thumbnail.

    Every step resizes the result of the step before. Rule: Idefics3.

    Args:
        longest: None: the first step keeps the size.
        split: False: only the thumbnail.
        first: height and width after the first step, whatever `longest` is.
    """

    longest: int | None
    tile: int
    split: bool = True
    limit: int = 4096
    first: Size | None = None

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        first = Resize.to(self.first_size(height, width))
        whole = Resize(self.tile, self.tile)
        if not self.split:
            return CropPlan((TiledView((first, whole)),))
        second = Resize.to(self._multiples(first.height, first.width))
        rows, columns = second.height // self.tile, second.width // self.tile
        if rows * columns == 1:
            return CropPlan((TiledView((first, second)),))
        return CropPlan((TiledView((first, second), rows, columns), TiledView((first, second, whole))), (rows, columns))

    def first_size(self, height: int, width: int) -> Size:
        """Return the size after the first step. The shorter side is made even before the limit is applied."""
        if self.first is not None:
            return self.first
        if self.longest is None:
            return height, width
        ratio = width / height
        if width >= height:
            tall, wide = int(self.longest / ratio), self.longest
            tall = max(1, tall + tall % 2)
        else:
            tall, wide = self.longest, int(self.longest * ratio)
            wide = max(1, wide + wide % 2)
        tall, wide = shrink(tall, wide, self.limit)
        return max(1, tall), max(1, wide)

    def _multiples(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            wide = round_up(width, self.tile)
            return round_up(int(wide / ratio), self.tile), wide
        tall = round_up(height, self.tile)
        return tall, round_up(int(tall * ratio), self.tile)


@dataclass(frozen=True)
class QuarterTiles:
    """Shrink the longer side to at most `longest`, keeping the aspect ratio, then stretch sides below `shortest` to it.

    `size`: the height and width of every view instead.
    `split`: the four quarters of the image come first, each resized in the same way, so views differ in size. Rule: Idefics2.
    """

    shortest: int
    longest: int
    split: bool = True
    size: Size | None = None

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        whole = TiledView((self._resize(height, width),))
        if not self.split:
            return CropPlan((whole,))
        if min(height, width) < 2:
            raise InputError(f"an image of {width}x{height} pixels cannot be cut into quarters; pass do_image_splitting=False")
        cut = (TiledView((crop, self._resize(crop.height, crop.width))) for crop in quarters(height, width))
        return CropPlan((*cut, whole), (2, 2))

    def _resize(self, height: int, width: int) -> Resize:
        if self.size is not None:
            return Resize.to(self.size)
        height, width = shrink(height, width, self.longest)
        return Resize(max(height, self.shortest), max(width, self.shortest))


@dataclass(frozen=True)
class KeptQuarters:
    """Keep the size of the image and, if `split`, of its four quarters, which come first. Rule: Idefics2 without do_resize.

    Sides of more than `longest` pixels, and views that have less than a patch of `patch` pixels along a side, are refused.
    """

    patch: int
    longest: int
    split: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        least = self.patch * (1 + self.split)
        if min(height, width) < least or max(height, width) > self.longest:
            sides = f"at least {least} and at most {self.longest} pixels"
            raise InputError(
                f"this model does not resize images (do_resize=false); give sides of {sides}, not {width}x{height}"
            )
        crops = quarters(height, width) if self.split else []
        views = tuple(TiledView((crop,)) for crop in [*crops, CropPad.window((height, width))])
        return CropPlan(views, (2, 2)) if self.split else CropPlan(views)


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
        tall, wide = max(self.sizes, key=lambda size: anyres_score(height, width, size))
        first, side = Resize.to(fit(height, width, (tall, wide))), self.longest
        window = CropPad(middle(first.height, tall), middle(first.width, wide), tall, wide)
        tops, lefts = range(0, tall, side), range(0, wide, side)
        crops = [CropPad(top, left, min(side, tall - top), min(side, wide - left)) for top in tops for left in lefts]
        views = (TiledView((first, window, crop, *self._fit(crop.height, crop.width))) for crop in crops)
        return CropPlan(tuple(views), (len(tops), len(lefts)))

    def _fit(self, height: int, width: int) -> tuple[Step, Step]:
        scale = self.longest / max(height, width)
        short = max(int(min(height, width) * scale), self.shortest)
        tall, wide = (short, self.longest) if width >= height else (self.longest, short)
        return Resize(tall, wide), CropPad(0, 0, round_up(tall, self.patch), round_up(wide, self.patch))


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
        whole = TiledView((Resize.to(self.size),))
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
        return CropPlan((whole, *(TiledView((crop, Resize.to(self.size))) for crop in crops)), tiles)


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
        resized = Resize(_whole_windows(tall, size), _whole_windows(wide, size))
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


def quarters(height: int, width: int) -> list[CropPad]:
    """Return the four quarters of an image."""
    bands, columns = (((0, side // 2), (side // 2, side - side // 2)) for side in (height, width))
    return [CropPad(top, left, height=tall, width=wide) for top, tall in bands for left, wide in columns]
