"""Which rows are kept of a picture that is seen whole and in tiles. Pure functions; knows no pixels, no family and no model.

The margins of the tiles go, what is left may be pooled, and each line of it ends in a row of its own.
Rule: LLaVA-NeXT, LLaVA-OneVision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .tiling import Pinpoints, Size, unpadded

FEW_SIZES: tuple[Size, ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
MANY_SIZES: tuple[Size, ...] = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
"""What pictures are fitted to where a checkpoint does not say: by up to 4 tiles of 336 pixels, by up to 36 of 384."""

POOL = 2  # patches of a clip's frame that become one row, along each side


@dataclass(frozen=True)
class Lines:
    """Of the tiles of one picture, in patches: `kept` rows and columns in the middle, resized to `size`; (0, 0): no tiles."""

    tiles: Size
    kept: Size
    size: Size

    @property
    def rows(self) -> int:
        """A row for each patch, and one at the end of each line; one alone where there are no tiles."""
        return self.size[0] * (self.size[1] + 1) if self.tiles[0] else 1


WHOLE = Lines((0, 0), (0, 0), (0, 0))


def lines(height: int, width: int, tiling: Pinpoints, side: int, most: int | None) -> Lines:
    """Of a picture of this size. `side`: patches of a tile's side; `most`: tiles' worth of patches that are not pooled."""
    tiles = tiling.plan(height, width).tiles
    kept = unpadded(height, width, (tiles[0] * side, tiles[1] * side))
    if most is None:
        return Lines(tiles, kept, kept)
    ratio = math.sqrt(kept[0] * kept[1] / (most * side**2))
    return Lines(tiles, kept, kept if ratio <= 1.1 else (int(kept[0] // ratio), int(kept[1] // ratio)))


def densest(tiling: Pinpoints, side: int, most: int | None) -> float:
    """The most patches that are encoded for each row that is kept, over pictures of all shapes."""
    shapes = [2 ** (i / 8) for i in range(-64, 65)]
    edge = max(max(size) for size in tiling.sizes)
    found = []
    for ratio in shapes:
        size = (edge, max(1, round(edge * ratio))) if ratio <= 1 else (max(1, round(edge / ratio)), edge)
        one = lines(*size, tiling, side, most)
        patches = (one.tiles[0] * one.tiles[1] + 1) * side**2
        found.append(patches / (side**2 + one.rows))
    return max(found)
