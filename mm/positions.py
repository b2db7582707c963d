"""M-RoPE positions of a sequence with media: text, grids, and two items interleaved by time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .types import ItemGeometry, PlaceholderRange, true_runs

PlacedItem = tuple[PlaceholderRange, ItemGeometry]
PositionRule = Callable[..., tuple[Tensor, int]]
PlaceRun = Callable[[int, int, int], tuple[Tensor, int]]


def text_positions(start: int, length: int, axes: int) -> Tensor:
    """Return positions of text, int64 `[axes, length]` from `start`; all axes advance together."""
    return torch.arange(start, start + length).expand(axes, -1)


def grid_positions(start: int, geometry: ItemGeometry, axes: int = 3, rows: int | None = None) -> Tensor:
    """Return positions of the first `rows` embeddings of an item (None: all), int64 `[axes, rows]`, step by step, line by line.

    The last three axes are time, height and width; an axis before them counts rows. Time is `start + int(step * time_step)`,
    truncated in float32 as in published models. Height and width are lines and columns of the merged grid. Example: t=1,
    h=4, w=6, merge=2 at 2 gives t 222222, h 222 333, w 234 234. Rows of a linear item have positions of text.
    """
    rows = geometry.num_embeds if rows is None else rows
    if geometry.linear:
        return text_positions(start, rows, axes)
    return torch.cat([torch.arange(rows).expand(axes - 3, -1), grid_indices(geometry, rows)]) + start


def grid_indices(geometry: ItemGeometry, rows: int) -> Tensor:
    """Return time, line and column of the first `rows` embeddings, counted from 0: int64 `[3, rows]`."""
    _, h, w = geometry.merged
    count = rows // (h * w) if h * w else 0
    assert count * h * w == rows, f"{rows} adjacent embeddings are not a whole number of steps of {h} x {w}"
    steps = (torch.arange(count, dtype=torch.float32) * torch.tensor(geometry.time_step, dtype=torch.float32)).long()
    return torch.stack(torch.meshgrid(steps, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)


def interleave_by_time(first: ItemGeometry, second: ItemGeometry, span: int = 1) -> Tensor:
    """Interleave by time the rows of two items that share a range: bool `[rows of both]`, True for rows of `first`.

    Rows are taken in windows of `span` time positions; within each, rows of `first` come before those of `second`.
    """
    times = [grid_positions(0, geometry)[0] // span for geometry in (first, second)]
    order = torch.cat(times).argsort(stable=True)
    return order < first.num_embeds


def mrope_positions(length: int, placed: Sequence[PlacedItem], axes: int = 3) -> tuple[Tensor, int]:
    """Return positions of a prompt, int64 `[axes, length]`, and the delta that decoding adds to the token index.

    Every run of adjacent embeddings is a grid of whole steps that starts where the text before it ended. Text continues at the
    largest position so far plus one; the other tokens of a range (start, end, timestamps) are text. Two items that share a
    range start together. Items with `ItemGeometry.positions` follow that rule. It is called with the position of the
    range, its items, the number of axes and how many ranges before it have the same rule, and returns positions
    int64 `[axes, tokens of the range]` and the one after them. With `axes=1` and no such item, positions are plain indices and
    the delta is 0.
    """
    if axes == 1 and not any(geometry.positions for _, geometry in placed):
        return torch.arange(length)[None], 0
    parts: list[Tensor] = []
    token = position = 0
    seen: Counter[str] = Counter()
    for items in _ranges(placed):
        where = items[0][0]
        parts.append(text_positions(position, where.offset - token, axes))
        position += where.offset - token
        rule = next((geometry.positions for _, geometry in items if geometry.positions), None)
        if rule is not None:
            part, position = rule(position, items, axes, seen[rule.name])
            seen[rule.name] += 1
        elif axes == 1:
            part, position = text_positions(position, where.length, axes), position + where.length
        else:
            part, position = range_positions(position, items, axes)
        parts.append(part)
        token = where.end
    parts.append(text_positions(position, length - token, axes))
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - length if length else 0


def range_positions(start: int, items: Sequence[PlacedItem], axes: int, run: PlaceRun | None = None) -> tuple[Tensor, int]:
    """Return positions of the range of one item, or of two that share it, and the one after them.

    `run` is called with the position and the tokens `[first, last)` of each run of embeddings, and returns the positions of
    the run and the one after them; None: runs are grids.
    """
    parts: list[Tensor] = []
    token, position, end = items[0][0].offset, start, items[0][0].end
    for first, last in runs_of(items):
        parts.append(text_positions(position, first - token, axes))
        position += first - token
        if run is None:
            rows = run_positions(position, first, last, items, axes)
            position = int(rows.max()) + 1
        else:
            rows, position = run(position, first, last)
        parts.append(rows)
        token = last
    parts.append(text_positions(position, end - token, axes))
    return torch.cat(parts, dim=1), position + end - token


def needs_axes(rule: PositionRule) -> PositionRule:
    """Decorate a rule for models with several axes: with one axis, the tokens of its items have positions of text."""

    @wraps(rule)
    def call(start: int, items: Sequence[PlacedItem], axes: int, *args: Any) -> tuple[Tensor, int]:
        length = items[0][0].length
        return (text_positions(start, length, 1), start + length) if axes == 1 else rule(start, items, axes, *args)

    return call


def _ranges(placed: Sequence[PlacedItem]) -> list[list[PlacedItem]]:
    """Return the item of each range in order, or the two items that share it."""
    ordered = sorted(placed, key=lambda pair: pair[0].offset)
    ranges = [list(group) for _, group in groupby(ordered, key=lambda pair: (pair[0].offset, pair[0].length))]
    for where, geometry in ordered:
        assert where.num_embeds == geometry.num_embeds, f"{where.num_embeds} tokens for {geometry.num_embeds} embeddings"
    return ranges


def runs_of(items: Sequence[PlacedItem]) -> Sequence[tuple[int, int]]:
    """Return the runs of embeddings `[first, last)` of one item, or of two that share a range."""
    where = items[0][0]
    return where.runs if len(items) == 1 else true_runs(where.mask() | items[1][0].mask(), where.offset)


def run_positions(start: int, first: int, last: int, items: Sequence[PlacedItem], axes: int) -> Tensor:
    """Return the positions of a run of tokens `[first, last)`, int64 `[axes, tokens]`; the first position is `start`."""
    if len(items) == 1:
        return grid_positions(start, items[0][1], axes, last - first)
    out = torch.empty(axes, last - first, dtype=torch.int64)
    for where, geometry in items:
        mask = where.mask()[first - where.offset : last - where.offset]
        out[:, mask] = grid_positions(start, geometry, axes, int(mask.sum()))
    return out
