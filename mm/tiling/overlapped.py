"""Policies that cut overlapping tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...callers.errors import ConfigError, InputError
from .plan import CropPad, CropPlan, Resize, Size, TiledView
from .sizes import arrangements, check_size


@dataclass(frozen=True)
class OverlappedTiles:
    """The whole image as one tile, then tiles of the same size that overlap, cut from a larger resize.

    Of the grids of at most `max_tiles` tiles, the one that enlarges the image least is taken or, if all of them shrink it, the
    one that shrinks it least. The aspect ratio is not kept. Rule: Molmo2.

    Args:
        patch: pixels along each side of a patch.
        side: patches along each side of a tile.
        margins: patches of a tile, at its start and its end along each axis, that its neighbours cover. Only those at the
            image's edge belong to this tile.
    """

    patch: int
    side: int
    margins: tuple[int, int] = (4, 4)
    max_tiles: int = 8

    def __post_init__(self) -> None:
        if min(self.margins) < 0 or sum(self.margins) >= self.side:
            raise ConfigError(f"overlap_margins {self.margins} leave nothing of a tile of {self.side} patches a side")

    @property
    def step(self) -> int:
        """Patches from one tile to the next."""
        return self.side - sum(self.margins)

    def canvas(self, rows: int, columns: int) -> Size:
        """Return the height and width in patches of the resized image that this many tiles cover."""
        return rows * self.step + sum(self.margins), columns * self.step + sum(self.margins)

    def arrangement(self, height: int, width: int) -> Size:
        """Return rows and columns of tiles. In float32, as published."""
        grids = sorted(arrangements(1, self.max_tiles), key=lambda grid: (grid[0] * grid[1], grid[0]))
        margin = sum(self.margins) * self.patch
        with np.errstate(divide="ignore"):
            sides = np.array([height - margin, width - margin], dtype=np.float32)
            scales = (np.array(grids, dtype=np.float32) * np.float32(self.step * self.patch) / sides).min(1)
        if (scales < 1).all():
            return grids[int(scales.argmax())]
        return grids[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        rows, columns = self.arrangement(height, width)
        tall, wide = self.canvas(rows, columns)
        size, step = self.side * self.patch, self.step * self.patch
        small, above, before = self.fit((height, width), (size, size))
        large, top, left = self.fit((height, width), (tall * self.patch, wide * self.patch))
        tiles = [
            TiledView((large, CropPad(row * step - top, column * step - left, size, size)))
            for row in range(rows)
            for column in range(columns)
        ]
        return CropPlan((TiledView((small, CropPad(-above, -before, size, size))), *tiles), (rows, columns))

    def fit(self, size: Size, canvas: Size) -> tuple[Resize, int, int]:
        """Return the resize of an image for a canvas in pixels, and the pixels above it and left of it there."""
        return Resize.to(canvas), 0, 0

    @property
    def patches_per_row(self) -> float:
        """The most patches per encoder row, if 2 x 2 patches make one, for lines with an end token and two tokens around."""
        small = _pooled_rows(self.side, self.side)
        return max(
            (1 + rows * columns) * self.side**2 / (small + _pooled_rows(*self.canvas(rows, columns)))
            for rows, columns in arrangements(1, self.max_tiles)
        )


@dataclass(frozen=True)
class PaddedOverlappedTiles(OverlappedTiles):
    """OverlappedTiles that keep the aspect ratio: black pixels around the image fill each view. Rule: Molmo."""

    max_tiles: int = 12

    def fit(self, size: Size, canvas: Size) -> tuple[Resize, int, int]:
        """See OverlappedTiles. In float32, as published; InputError if nothing is left of the image."""
        scale = min(np.float32(outer) / np.float32(side) for outer, side in zip(canvas, size, strict=True))
        tall, wide = (int(np.float32(side) * scale) for side in size)
        if min(tall, wide) < 1:
            raise InputError(f"an image of {size[1]}x{size[0]} is too narrow: resized to this model's views, it has no pixels")
        return Resize(tall, wide), (canvas[0] - tall) // 2, (canvas[1] - wide) // 2

    def padding(self, height: int, width: int) -> np.ndarray:
        """Return how much of each patch of the tiles is padding: int64 `[tiles, side, side]`; 0: nothing, 1: all, 2: a part."""
        rows, columns = self.arrangement(height, width)
        tall, wide = self.canvas(rows, columns)
        image, top, left = self.fit((height, width), (tall * self.patch, wide * self.patch))
        lines = _covered(tall, self.patch, top, image.height)
        pixels = lines[:, None] * _covered(wide, self.patch, left, image.width)
        kinds = np.where(pixels == 0, 1, np.where(pixels < self.patch**2, 2, 0))
        starts = [(row * self.step, column * self.step) for row in range(rows) for column in range(columns)]
        return np.stack([kinds[row : row + self.side, column : column + self.side] for row, column in starts])


def _covered(patches: int, patch: int, start: int, length: int) -> np.ndarray:
    """Return how many of the pixels of each patch of an axis are from `start` to `start + length`."""
    edges = np.arange(patches) * patch
    inside: np.ndarray = np.minimum(edges + patch, start + length) - np.maximum(edges, start)
    return inside.clip(0, patch)


def _pooled_rows(tall: int, wide: int) -> int:
    return -(-tall // 2) * (-(-wide // 2) + 1) + 2
