"""The positions of MiniCPM-V 4.7's images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.positions import PlacedItem, needs_axes
from ....mm.rules import register


@register
@needs_axes
def on_canvas(
    start: int, items: Sequence[PlacedItem], axes: int, number: int, whole: tuple[int, int], tile: tuple[int, int]
) -> tuple[Tensor, int]:
    """Put the tiles of an image, and the whole image, on one canvas. Both have `(height, width)` in rows.

    Each frame is a whole image between two tokens, then tiles, each between two tokens, with a token between their lines. The
    tiles lie side by side, in lines and columns from `start`, and the whole image is spread over them. Time stands still at the
    start of the frame. The tokens around lie at corners. Other tokens of the range have the frame's first position.
    """
    where, geometry = items[0]
    (tall, wide), (high, broad), (lines, columns) = whole, tile, geometry.tiles
    down, across = (lines * high, columns * broad) if lines else (tall, wide)
    out = torch.empty(3, where.length, dtype=torch.int64)
    runs = [(first - where.offset, last - where.offset) for first, last in where.runs]
    for at in range(0, len(runs), 1 + lines * columns):
        (first, last), tiles = runs[at], runs[at + 1 : at + 1 + lines * columns]
        out[:, first - 1 :] = start
        out[1:, first - 1] = max(start - 1, 0)
        out[1:, first:last] += _spread(down, tall, across, wide)
        out[1:, last] += torch.tensor([down, across])
        for number, (left, right) in enumerate(tiles):
            line, column = divmod(number, columns)
            corner = torch.tensor([line * high, column * broad])
            out[1:, left - 1] += corner
            out[1:, left:right] += _spread(high, high, broad, broad) + corner[:, None]
            out[1:, right] += corner + torch.tensor([high - 1, broad - 1])
            if column == columns - 1 and line < lines - 1:
                out[1:, right + 1] += torch.tensor([(line + 1) * high - 1, across])
        start += max(down, across) + 1
    return out, start


def _spread(down: int, tall: int, across: int, wide: int) -> Tensor:
    """Return lines and columns of a grid of `tall` x `wide` rows that is spread over `down` x `across`, int64 `[2, rows]`."""
    sides = (torch.linspace(0, size - 1, count).round().long() for size, count in ((down, tall), (across, wide)))
    return torch.stack(torch.meshgrid(*sides, indexing="ij")).flatten(1)
