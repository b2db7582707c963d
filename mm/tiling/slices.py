"""Policies that take the whole image and as many slices as its area needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...callers.errors import InputError
from .aspect import AspectTiles
from .plan import CropPad, CropPlan, Resize, Size, TiledView
from .sizes import arrangements, check_size, grids_by_rows, nearest_multiple

MAX_PACKED_FRAMES = 3  # frames of a video that become the rows of one (MiniCPM-V 4.5)


@dataclass(frozen=True)
class SliceTiles:
    """The whole image, then a grid of at most `max_slices` slices with the nearest aspect ratio. Rule: MiniCPM-V.

    The whole image and each slice get about `side` x `side` pixels, in multiples of `multiple` pixels a side. An image of at
    most that area is not cut; it keeps its size if `enlarges` is False.
    """

    side: int
    multiple: int
    max_slices: int
    enlarges: bool = True

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        grid = self.arrangement(height, width)
        if grid is None:
            return CropPlan((TiledView((Resize.to(self.fitted(height, width, self.enlarges)),)),))
        whole = TiledView((Resize.to(self.fitted(height, width, False)),))
        tall, wide = (nearest_multiple(side, parts) / parts for side, parts in zip((height, width), grid, strict=True))
        slice_size = self.fitted(tall, wide, True)
        cut = TiledView((Resize(slice_size[0] * grid[0], slice_size[1] * grid[1]),), rows=grid[0], columns=grid[1])
        return CropPlan((whole, cut), grid)

    def arrangement(self, height: int, width: int) -> Size | None:
        """Return rows and columns of slices; None if the image is not cut."""
        count = min(math.ceil(width * height / self.side**2), self.max_slices)
        if count <= 1:
            return None
        counts = [slices for slices in (count - 1, count, count + 1) if 1 < slices <= self.max_slices]
        grids = [(rows, slices // rows) for slices in counts for rows in range(1, slices + 1) if slices % rows == 0]
        ratio = math.log(width / height)
        return min(grids, key=lambda grid: (abs(ratio - math.log(grid[1] / grid[0])), -grid[0]))

    def most_patches(self, patch: int) -> int:
        """Return the limit on the patches of a view for models that make any view the same number of rows."""
        return 5 * (self.side // patch) ** 2 // 4

    def fitted(self, height: float, width: float, enlarge: bool) -> Size:
        """Return (height, width) of a view of about `side` x `side` pixels. `enlarge`: smaller ones are enlarged to it."""
        if enlarge or height * width > self.side**2:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        return nearest_multiple(height, self.multiple), nearest_multiple(width, self.multiple)


@dataclass(frozen=True)
class CoveringTiles:
    """The whole image, then the fewest tiles, at most `max_tiles`, that show more than 9/10 of it undiminished. Rule: Ovis2.

    All are squares of `side` pixels. If no arrangement shows as much, the one that shows most is taken. As in transformers,
    rows and columns are exchanged when arrangements are compared.

    `nearest`: this policy's arrangement of at most `max_tiles` tiles is taken instead.
    """

    side: int
    max_tiles: int
    nearest: AspectTiles | None = None

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        if self.nearest is not None:
            rows, columns = self.nearest.arrangement(height, width)
        else:
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
        return min(enough or most, key=lambda candidate: candidate[:2])[2]

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
