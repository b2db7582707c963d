"""Layout of encoder rows for anyres tiling: which patches of an image's tiles are kept. Pure functions.

The padding of the tiles is cut off, the rest may be pooled, and one more encoder row ends every line of patches.
Rule: LLaVA-NeXT, LLaVA-OneVision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .tiling.canvas import AnyResTiles
from .tiling.plan import Size
from .tiling.sizes import unpad

PINPOINTS_336: tuple[Size, ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
PINPOINTS_384: tuple[Size, ...] = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
"""Default image sizes if a checkpoint has none: up to 4 tiles of 336 pixels, up to 36 tiles of 384 pixels."""
PINPOINTS_MINIMAX: tuple[Size, ...] = tuple(
    (336 * rows, 336 * columns) for rows, most in enumerate((6, 6, 6, 4, 3, 3), 1) for columns in range(1, most + 1)
)
"""Default image sizes of MiniMax-VL-01: up to 18 tiles."""

POOL_STRIDE = 2  # patches of a video frame that become one row, along each side


@dataclass(frozen=True)
class AnyResLayout:
    """The patches of an image's tiles: the middle `kept` (height, width) are resized to `size`. `tiles` (0, 0): no tiles."""

    tiles: Size
    kept: Size
    size: Size

    @property
    def rows(self) -> int:
        """Rows of the tiles: one per patch and one per line end. Without tiles it is one row."""
        return self.size[0] * (self.size[1] + 1) if self.tiles[0] else 1


UNTILED = AnyResLayout((0, 0), (0, 0), (0, 0))


def anyres_layout(height: int, width: int, tiling: AnyResTiles, side: int, max_tiles: int | None) -> AnyResLayout:
    """Return the layout of an image.

    Args:
        side: patches along a side of a tile.
        max_tiles: if an image has more patches than this many tiles, they are pooled to about that number; None: never.
    """
    tiles = tiling.plan(height, width).tiles
    kept = unpad(height, width, (tiles[0] * side, tiles[1] * side))
    if max_tiles is None:
        return AnyResLayout(tiles, kept, kept)
    ratio = math.sqrt(kept[0] * kept[1] / (max_tiles * side**2))
    return AnyResLayout(tiles, kept, kept if ratio <= 1.1 else (int(kept[0] // ratio), int(kept[1] // ratio)))


def max_patches_per_row(tiling: AnyResTiles, side: int, max_tiles: int | None) -> float:
    """Return the largest ratio of encoded patches to kept rows over images of all shapes."""
    shapes = [2 ** (i / 8) for i in range(-64, 65)]
    edge = max(max(size) for size in tiling.sizes)
    found = []
    for ratio in shapes:
        size = (edge, max(1, round(edge * ratio))) if ratio <= 1 else (max(1, round(edge / ratio)), edge)
        one = anyres_layout(*size, tiling, side, max_tiles)
        patches = (one.tiles[0] * one.tiles[1] + 1) * side**2
        found.append(patches / (side**2 + one.rows))
    return max(found)
