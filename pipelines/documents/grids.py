"""Grids of rules: rows and columns between horizontal and vertical lines that cross or touch each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...mm.media.page_facts import Box
from ...mm.media.page_rules import Rule

_NEAR = 2.5  # points between rules that touch, or that are one
_COVERED = 0.6  # share of a cell's side that a rule covers
_MIN_SIDE = 4.0  # points of a row or column
_MAX_PAIRS = 250_000  # of a horizontal and a vertical rule: a page with more is a drawing
_MAX_CELLS = 10_000

_Line = tuple[float, float, float]
"""A rule: its place, and its two ends along the other axis."""
_Place = tuple[int, int]
"""Row and column."""


@dataclass(frozen=True)
class Grid:
    """Rows and columns between rules.

    Args:
        xs, ys: sides of the columns and rows, in order. Where a border is missing, the rules that cross it end there.
        spans: rows and columns of each cell, by those of its upper left corner.
        corners: the upper left corner of the cell at each row and column.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    spans: dict[_Place, _Place] = field(repr=False)
    corners: dict[_Place, _Place] = field(repr=False)

    @property
    def box(self) -> Box:
        return self.xs[0], self.ys[0], self.xs[-1], self.ys[-1]

    def holds(self, boxes: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return for boxes `[boxes, 4]` whether the middle is inside, and at most a fifth of the width is not."""
        left, top, right, bottom = self.box
        across, down = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
        inside = np.minimum(boxes[:, 2], right) - np.maximum(boxes[:, 0], left)
        is_wide = inside > 0.8 * (boxes[:, 2] - boxes[:, 0])
        held: NDArray[np.bool_] = (left < across) & (across < right) & (top < down) & (down < bottom) & is_wide
        return held

    def cell_at(self, x: float, y: float) -> _Place:
        """Return the upper left corner of the cell at a point, or of the nearest one."""
        row = min(max(bisect_right(self.ys, y) - 1, 0), len(self.ys) - 2)
        column = min(max(bisect_right(self.xs, x) - 1, 0), len(self.xs) - 2)
        return self.corners[row, column]


def find_grids(rules: Sequence[Rule]) -> Iterator[Grid]:
    """Yield the grids of at least two columns."""
    across = list(_joined((rule[1], rule[0], rule[2]) for rule in rules if rule[1] == rule[3]))
    down = list(_joined((rule[0], rule[1], rule[3]) for rule in rules if rule[0] == rule[2] and rule[1] != rule[3]))
    if len(across) * len(down) > _MAX_PAIRS:
        return
    for horizontals, verticals in _connected(across, down):
        xs, ys = _sides(verticals, horizontals), _sides(horizontals, verticals)
        if len(xs) > 2 and len(ys) > 1 and len(xs) * len(ys) <= _MAX_CELLS:
            spans, corners = _cells(xs, ys, horizontals, verticals)
            yield Grid(xs, ys, spans, corners)


def _joined(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Yield lines in order of their places. Those at one place that touch each other are one line."""
    near = list[_Line]()
    for line in sorted(lines):
        if near and line[0] - near[0][0] > _NEAR:
            yield from _touching(near)
            near = []
        near.append(line)
    yield from _touching(near)


def _touching(near: Sequence[_Line]) -> Iterator[_Line]:
    whole: _Line | None = None
    for place, start, end in sorted(near, key=lambda line: line[1:]):
        if whole is not None and start <= whole[2] + _NEAR:
            whole = (whole[0], whole[1], max(whole[2], end))
            continue
        if whole is not None:
            yield whole
        whole = (place, start, end)
    if whole is not None:
        yield whole


def _connected(across: Sequence[_Line], down: Sequence[_Line]) -> Iterator[tuple[list[_Line], list[_Line]]]:
    """Yield horizontal and vertical lines that are connected by others."""
    down = sorted(down)
    places, neighbours = [line[0] for line in down], defaultdict[int, list[int]](list)
    for i, (y, left, right) in enumerate(across):
        for k in range(bisect_left(places, left - _NEAR), bisect_right(places, right + _NEAR)):
            if down[k][1] - _NEAR <= y <= down[k][2] + _NEAR:
                neighbours[i].append(len(across) + k)
                neighbours[len(across) + k].append(i)
    seen = set[int]()
    for first in range(len(across)):
        if first in seen:
            continue
        waiting, group = [first], list[int]()
        while waiting:
            if (index := waiting.pop()) not in seen:
                seen.add(index)
                group.append(index)
                waiting += neighbours[index]
        yield [across[i] for i in group if i < len(across)], [down[i - len(across)] for i in group if i >= len(across)]


def _sides(lines: Sequence[_Line], crossing: Sequence[_Line]) -> tuple[float, ...]:
    """Return the positions of lines and of the ends of lines that cross them. Of positions too close, one is kept."""
    places = [line[0] for line in lines]
    places += [min((line[1] for line in crossing), default=0.0), max((line[2] for line in crossing), default=0.0)]
    sides = list[float]()
    for place in sorted(places):
        if not sides or place - sides[-1] >= _MIN_SIDE:
            sides.append(place)
    return tuple(sides)


def _cells(
    xs: Sequence[float], ys: Sequence[float], horizontals: Sequence[_Line], verticals: Sequence[_Line]
) -> tuple[dict[_Place, _Place], dict[_Place, _Place]]:
    """Return the spans and the corners of a grid: neighbours without a rule between them, if a rectangle, are one cell."""
    rows, columns = len(ys) - 1, len(xs) - 1
    right_of, below = _borders(xs, ys, verticals), _borders(ys, xs, horizontals)
    spans, corners = dict[_Place, _Place](), dict[_Place, _Place]()
    for start in ((row, column) for row in range(rows) for column in range(columns)):
        if start in corners:
            continue
        waiting, cell = [start], set[_Place]()
        while waiting:
            place = row, column = waiting.pop()
            if place in cell or not (0 <= row < rows and 0 <= column < columns):
                continue
            cell.add(place)
            waiting += [] if (column, row) in right_of else [(row, column + 1)]
            waiting += [] if (column - 1, row) in right_of else [(row, column - 1)]
            waiting += [] if (row, column) in below else [(row + 1, column)]
            waiting += [] if (row - 1, column) in below else [(row - 1, column)]
        top, left = min(row for row, _ in cell), min(column for _, column in cell)
        height, width = max(row for row, _ in cell) + 1 - top, max(column for _, column in cell) + 1 - left
        is_rectangle = height * width == len(cell)
        for place in cell:
            corners[place] = (top, left) if is_rectangle else place
            if not is_rectangle or place == (top, left):
                spans[place] = (height, width) if is_rectangle else (1, 1)
    return spans, corners


def _borders(places: Sequence[float], sides: Sequence[float], lines: Sequence[_Line]) -> set[_Place]:
    """Return where rules stand: the number of a side, from the second, and that of the row or column beside it."""
    found = set[_Place]()
    at = defaultdict[int, list[_Line]](list)
    for line in lines:
        number = bisect_right(places, line[0] + _NEAR) - 1
        if number > 0:
            at[number - 1].append(line)
    for number, group in at.items():
        for other, (start, end) in enumerate(pairwise(sides)):
            covered = sum(max(min(line[2], end) - max(line[1], start), 0.0) for line in group)
            if covered >= _COVERED * (end - start):
                found.add((number, other))
    return found
