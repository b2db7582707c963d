"""The rows of Mllama's images that tokens cross-attend to."""

from __future__ import annotations

from ....mm.rules import register


@register
def rows_of_tiles(rows: int, padding: int) -> int:
    """Return how many rows belong to tiles of the image. The last `padding` rows are those of padding tiles."""
    return rows - padding
