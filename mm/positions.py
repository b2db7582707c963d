"""Rotary positions of a sequence with media: the text run and the grid run. Knows grids and ranges, no family."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import ItemGeometry, PlaceholderRange


def text_run(start: int, length: int, axes: int) -> Tensor:
    """All axes advance together: int64 `[axes, length]` from `start`."""
    return torch.arange(start, start + length).expand(axes, -1)


def grid_run(start: int, geometry: ItemGeometry, axes: int = 3) -> Tensor:
    """Positions of one item's embeddings, row by row, step by step: int64 `[axes, num_embeds]`.

    Axis 0 is `start + int(step * time_step)`, the product cut in float32 as the published models do; axes 1 and 2
    count rows and columns of the merged grid. Example: t=1, h=4, w=6, merge=2 at 2 gives
    t 222222, h 222 333, w 234 234.
    """
    t, h, w = geometry.merged
    steps = (torch.arange(t, dtype=torch.float32) * torch.tensor(geometry.time_step, dtype=torch.float32)).long()
    grid = torch.stack(torch.meshgrid(steps, torch.arange(h), torch.arange(w), indexing="ij"))  # [3, t, h, w]
    return grid.flatten(1)[:axes] + start


def mrope_positions(length: int, placed: Sequence[tuple[PlaceholderRange, ItemGeometry]], axes: int = 3) -> tuple[Tensor, int]:
    """Positions of a whole prompt, int64 `[axes, length]`, and the delta that decoding adds to its token index.

    Text after an item continues at the largest position used so far plus one. Embeddings of a range follow
    the grid; its other tokens (starts, ends, row breaks) are text. `axes=1` is a plain count with delta 0.
    """
    if axes == 1:
        return torch.arange(length)[None], 0
    parts: list[Tensor] = []
    token = position = 0
    for where, geometry in sorted(placed, key=lambda pair: pair[0].offset):
        start, count = _embed_run(where)
        assert count == geometry.num_embeds, f"{count} placeholder tokens for {geometry.num_embeds} embeddings"
        parts.append(text_run(position, start - token, axes))
        position += start - token
        parts.append(grid_run(position, geometry, axes))
        token, position = start + count, int(parts[-1].max()) + 1 if count else position
    parts.append(text_run(position, length - token, axes))
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - length if length else 0


def _embed_run(where: PlaceholderRange) -> tuple[int, int]:
    """First token and number of a range's embeddings, which lie side by side."""
    if where.is_embed is None:
        return where.offset, where.length
    tokens = where.is_embed.nonzero().flatten()
    assert not tokens.numel() or int(tokens[-1] - tokens[0]) + 1 == tokens.numel(), "embeddings of one grid lie side by side"
    return where.offset + (int(tokens[0]) if tokens.numel() else 0), tokens.numel()
