"""Layout of encoder rows for anyres tiling: which patches of an image's tiles are kept. Pure functions.

The padding of the tiles is cut off, the rest may be pooled, and one more encoder row ends every line of patches.
Rule: LLaVA-NeXT, LLaVA-OneVision. Images that fill their tiles (MinerU 2.0) have no padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.canvas import AnyResTiles
from ....mm.tiling.plan import Size
from ....mm.tiling.sizes import unpad

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


_RANGE = re.compile(r"\((\d{1,2})x(\d{1,2})\)")


def stretched_tiles(config: Mapping[str, Any], side: int) -> tuple[AnyResTiles, int | None]:
    """Read the tiles of MinerU 2.0 from config.json: the tiling, and the `max_tiles` of anyres_layout.

    `image_grid_pinpoints` is "(1x1),...,(4x4)", the fewest and the most tiles across and down, or a list of widths and heights.

    Raises:
        ConfigError: `image_grid_pinpoints` or `image_aspect_ratio` is not in such a form.
    """
    sizes, ratio = config.get("image_grid_pinpoints") or "(1x1),...,(4x4)", config.get("image_aspect_ratio")
    if isinstance(sizes, str):
        ends = [(int(wide), int(tall)) for wide, tall in _RANGE.findall(sizes)] or [(0, 0)]
        (left, top), (right, bottom) = ends[0], ends[-1]
        sizes = [(wide * side, tall * side) for wide in range(left, right + 1) for tall in range(top, bottom + 1)]
    if not isinstance(sizes, list) or any(len(size) != 2 for size in sizes) or not sizes:
        raise ConfigError("image_grid_pinpoints in config.json is not a range of tiles such as (1x1),...,(4x4)")
    kind = re.fullmatch(r"(?:square_)?anyres(?:_max_(\d{1,3}))?", str(ratio or "square_anyres_max_9"))
    if kind is None:
        raise ConfigError(f"image_aspect_ratio in config.json is {ratio!r}; give square_anyres_max_ followed by a number")
    tiling = AnyResTiles((side, side), (side, side), tuple((int(tall), int(wide)) for wide, tall in sizes), stretch=True)
    return tiling, int(kind[1]) if kind[1] else None


def anyres_layout(height: int, width: int, tiling: AnyResTiles, side: int, max_tiles: int | None) -> AnyResLayout:
    """Return the layout of an image.

    Args:
        side: patches along a side of a tile.
        max_tiles: if an image has more patches than this many tiles, they are pooled to about that number; None: never.
    """
    tiles = tiling.plan(height, width).tiles
    kept = tiles[0] * side, tiles[1] * side
    if not tiling.stretch:
        kept = unpad(height, width, kept)
    if max_tiles is None:
        return AnyResLayout(tiles, kept, kept)
    ratio = math.sqrt(kept[0] * kept[1] / (max_tiles * side**2))
    return AnyResLayout(tiles, kept, kept if ratio <= 1.1 else (int(kept[0] // ratio), int(kept[1] // ratio)))


def max_patches_per_row(tiling: AnyResTiles, side: int, max_tiles: int | None) -> float:
    """Return the largest ratio of encoded patches to kept rows over images of all shapes."""
    shapes = [2 ** (i / 8) for i in range(-64, 65)]
    edge = max(max(size) for size in tiling.sizes)
    ratios = []
    for ratio in shapes:
        size = (edge, max(1, round(edge * ratio))) if ratio <= 1 else (max(1, round(edge / ratio)), edge)
        layout = anyres_layout(*size, tiling, side, max_tiles)
        patches = (layout.tiles[0] * layout.tiles[1] + 1) * side**2
        ratios.append(patches / (side**2 + layout.rows))
    return max(ratios)
