"""Rotary positions of a sequence with media: runs of text, of grids, and of two items in step. Knows ranges, no family."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from .types import ItemGeometry, PlaceholderRange, true_runs

Placed = tuple[PlaceholderRange, ItemGeometry]


def text_run(start: int, length: int, axes: int) -> Tensor:
    """All axes advance together: int64 `[axes, length]` from `start`."""
    return torch.arange(start, start + length).expand(axes, -1)


def grid_run(start: int, geometry: ItemGeometry, axes: int = 3, rows: int | None = None) -> Tensor:
    """Positions of the first `rows` embeddings of an item (None: of all), int64 `[axes, rows]`, step by step, line by line.

    The last three axes are time, height and width. Time is `start + int(step * time_step)`, the product cut in float32 as
    the published models do; height and width count lines and columns of the merged grid; an axis before them counts rows.
    Example: t=1, h=4, w=6, merge=2 at 2 gives t 222222, h 222 333, w 234 234. Rows of a linear item are a run of text.
    """
    rows = geometry.num_embeds if rows is None else rows
    if geometry.linear:
        return text_run(start, rows, axes)
    _, h, w = geometry.merged
    count = rows // (h * w) if h * w else 0
    assert count * h * w == rows, f"{rows} embeddings side by side are no whole steps of {h} x {w}"
    steps = (torch.arange(count, dtype=torch.float32) * torch.tensor(geometry.time_step, dtype=torch.float32)).long()
    grid = torch.stack(torch.meshgrid(steps, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)  # [3, rows]
    return torch.cat([torch.arange(rows).expand(axes - 3, -1), grid]) + start


def in_step(first: ItemGeometry, second: ItemGeometry, span: int = 1) -> Tensor:
    """How the rows of two items that share a range lie in it by time: bool `[rows of both]`, true where it is one of `first`.

    Rows are taken by spans of so many positions of time, in each those of `first` before those of `second`.
    """
    times = [grid_run(0, geometry)[0] // span for geometry in (first, second)]
    order = torch.cat(times).argsort(stable=True)
    return order < first.num_embeds


def mrope_positions(length: int, placed: Sequence[Placed], axes: int = 3) -> tuple[Tensor, int]:
    """Positions of a whole prompt, int64 `[axes, length]`, and the delta that decoding adds to its token index.

    Each run of embeddings that lie side by side is a grid of whole steps that starts anew where the text before it ended,
    and text continues at the largest position used so far plus one; other tokens of a range (starts, ends, times) are text.
    Two items that share a range start together; of folded items the tokens around the rows take no position of their own.
    `axes=1` is a plain count with delta 0.
    """
    if axes == 1:
        return torch.arange(length)[None], 0
    parts: list[Tensor] = []
    token = position = 0
    for first, last, items in _runs(placed):
        where, folded = items[0][0], any(geometry.folded for _, geometry in items)
        before, after = (first - where.offset, where.end - last) if folded else (0, 0)
        parts.append(text_run(position, first - before - token, axes))
        position += first - before - token
        rows = _together(position, first, last, items, axes)
        parts += [torch.full((axes, before), max(0, position - 1)), rows]
        token, position = last + after, int(rows.max()) + 1
        parts.append(torch.full((axes, after), position))
    parts.append(text_run(position, length - token, axes))
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - length if length else 0


def _runs(placed: Sequence[Placed]) -> list[tuple[int, int, list[Placed]]]:
    """Runs of embeddings `[first, last)` in order, with the items (one, or two that share their range) whose rows they hold."""
    ordered = sorted(placed, key=lambda pair: pair[0].offset)
    runs = []
    for (offset, _), group in groupby(ordered, key=lambda pair: (pair[0].offset, pair[0].length)):
        items = list(group)
        for where, geometry in items:
            assert where.num_embeds == geometry.num_embeds, f"{where.num_embeds} tokens for {geometry.num_embeds} embeddings"
        held = items[0][0].runs if len(items) == 1 else true_runs(items[0][0].mask() | items[1][0].mask(), offset)
        runs += [(first, last, items) for first, last in held]
    return runs


def _together(start: int, first: int, last: int, items: Sequence[Placed], axes: int) -> Tensor:
    """Positions of the run of tokens `[first, last)`, from `start`, int64 `[axes, tokens]`."""
    if len(items) == 1:
        return grid_run(start, items[0][1], axes, last - first)
    out = torch.empty(axes, last - first, dtype=torch.int64)
    for where, geometry in items:
        own = where.mask()[first - where.offset : last - where.offset]
        out[:, own] = grid_run(start, geometry, axes, int(own.sum()))
    return out
