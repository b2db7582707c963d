"""M-RoPE positions of a sequence with media: text, grids, and two items interleaved by time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from .types import ItemGeometry, PlaceholderRange, true_runs

PlacedItem = tuple[PlaceholderRange, ItemGeometry]


def text_positions(start: int, length: int, axes: int) -> Tensor:
    """Return positions of text, int64 `[axes, length]` from `start`; all axes advance together."""
    return torch.arange(start, start + length).expand(axes, -1)


def grid_positions(start: int, geometry: ItemGeometry, axes: int = 3, rows: int | None = None) -> Tensor:
    """Return positions of the first `rows` embeddings of an item (None: all), int64 `[axes, rows]`, step by step, line by line.

    The last three axes are time, height and width; an axis before them counts rows. Time is `start + int(step * time_step)`,
    truncated in float32 as in published models. Height and width are lines and columns of the merged grid. Example: t=1,
    h=4, w=6, merge=2 at 2 gives t 222222, h 222 333, w 234 234. Rows of a linear item have positions of text. Height and width
    of a timed item start at 0.
    """
    rows = geometry.num_embeds if rows is None else rows
    if geometry.linear:
        return text_positions(start, rows, axes)
    _, h, w = geometry.merged
    count = rows // (h * w) if h * w else 0
    assert count * h * w == rows, f"{rows} adjacent embeddings are not a whole number of steps of {h} x {w}"
    steps = (torch.arange(count, dtype=torch.float32) * torch.tensor(geometry.time_step, dtype=torch.float32)).long()
    grid = torch.stack(torch.meshgrid(steps, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)  # [3, rows]
    if geometry.timed:
        return torch.cat([(grid[:1] + start).expand(axes - 2, -1), grid[1:]])
    return torch.cat([torch.arange(rows).expand(axes - 3, -1), grid]) + start


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
    largest position so far plus one, after a timed item at its last time plus one; the other tokens of a range (start, end,
    timestamps) are text. If the steps of an item differ in size, each run is one step. Two items that share a range start
    together. The tokens before and after the rows of a `folded` item repeat the positions of the text beside the range. All
    tokens of a `still` item have one position. With `axes=1` and no such item positions are plain indices and the delta is 0.
    The tokens of an item with a `canvas` lie on it, see `_canvas_positions`.
    """
    if axes == 1 and not any(geometry.still for _, geometry in placed):
        return torch.arange(length)[None], 0
    if any(geometry.absolute for _, geometry in placed):
        return _absolute_positions(length, placed, axes)
    parts: list[Tensor] = []
    token = position = 0
    for first, last, items in _runs(placed):
        if items[0][1].canvas is not None:
            where, geometry = items[0]
            if first == where.runs[0][0]:  # the first run stands for all
                parts.append(text_positions(position, where.offset - token, axes))
                on_canvas, position = _canvas_positions(position + where.offset - token, where, geometry)
                parts.append(on_canvas)
                token = where.end
            continue
        where, folded = items[0][0], any(geometry.folded for _, geometry in items)
        if items[0][1].still:
            parts.append(text_positions(position, where.offset - token, axes))
            position += where.offset - token
            parts.append(torch.full((axes, where.length), position))
            token, position = where.end, position + 1
            continue
        before, after = (first - where.offset, where.end - last) if folded else (0, 0)
        parts.append(text_positions(position, first - before - token, axes))
        position += first - before - token
        rows = _run_positions(position, first, last, items, axes)
        parts += [torch.full((axes, before), max(0, position - 1)), rows]
        timed = all(geometry.timed for _, geometry in items)
        token, position = last + after, int((rows[-3] if timed else rows).max()) + 1
        parts.append(torch.full((axes, after), position))
    parts.append(text_positions(position, length - token, axes))
    positions = torch.cat(parts, dim=1)
    return positions, int(positions.max()) + 1 - length if length else 0


def _absolute_positions(length: int, placed: Sequence[PlacedItem], axes: int) -> tuple[Tensor, int]:
    """Return positions and delta of a prompt with `absolute` items; the other tokens are at their index."""
    positions = text_positions(0, length, axes).clone()
    absolute = sorted((pair for pair in placed if pair[1].absolute), key=lambda pair: pair[0].offset)
    for index, (where, geometry) in enumerate(absolute):
        _, h, w = geometry.merged
        lines, columns = torch.meshgrid(torch.arange(h), torch.arange(w + 1), indexing="ij")
        grid = torch.stack([columns, lines, torch.full_like(lines, index)]).flatten(1)
        positions[-3:, where.offset + 1 : where.offset + 1 + grid.shape[1]] = grid
    return positions, int(positions.max()) + 1 - length if length else 0


def _canvas_positions(start: int, where: PlaceholderRange, geometry: ItemGeometry) -> tuple[Tensor, int]:
    """Return positions of a range, int64 `[3, length]`, and the one after them. Rule: MiniCPM-V 4.7.

    Each frame is a whole image between two tokens, then tiles, each between two tokens, with a token between their lines. The
    tiles lie side by side, in lines and columns from `start`, and the whole image is spread over them. Time stands still at the
    start of the frame. The tokens around lie at corners. Other tokens of the range have the frame's first position.
    """
    assert geometry.canvas is not None
    ((tall, wide), (high, broad)), (lines, columns) = geometry.canvas, geometry.tiles
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


def _runs(placed: Sequence[PlacedItem]) -> list[tuple[int, int, list[PlacedItem]]]:
    """Return runs of embeddings `[first, last)` in order, each with its item, or with the two items that share it."""
    ordered = sorted(placed, key=lambda pair: pair[0].offset)
    runs = []
    for (offset, _), group in groupby(ordered, key=lambda pair: (pair[0].offset, pair[0].length)):
        items = list(group)
        for where, geometry in items:
            assert where.num_embeds == geometry.num_embeds, f"{where.num_embeds} tokens for {geometry.num_embeds} embeddings"
        held = items[0][0].runs if len(items) == 1 else true_runs(items[0][0].mask() | items[1][0].mask(), offset)
        steps = [[(where, step)] for where, geometry in items for step in geometry.steps] or [items] * len(held)
        runs += [(first, last, several) for (first, last), several in zip(held, steps, strict=True)]
    return runs


def _run_positions(start: int, first: int, last: int, items: Sequence[PlacedItem], axes: int) -> Tensor:
    """Return the positions of a run of tokens `[first, last)`, int64 `[axes, tokens]`; the first position is `start`."""
    if len(items) == 1:
        return grid_positions(start, items[0][1], axes, last - first)
    out = torch.empty(axes, last - first, dtype=torch.int64)
    for where, geometry in items:
        own = where.mask()[first - where.offset : last - where.offset]
        out[:, own] = grid_positions(start, geometry, axes, int(own.sum()))
    return out
