"""Straightens the picture of a scanned page that is askew or turned, so that the rows of tables are horizontal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...mm.media.page_facts import Box
from .blocks import Block, union

LINE_HEIGHT = 12.0
"""Units of the page's median line: nearly points of a printed text, in which distances of rules are compared."""
_MAX_SKEW = 10.0  # degrees; lines with a larger skew are ignored
_MIN_SKEW = 0.05
_LONG = 5.0  # heights of a line that shows the skew
_LEAST_LINES = 3
_ABOVE, _BESIDE = 0.09, 0.18  # margins of a quad around its text, in its heights: text detection enlarges its boxes

Point = tuple[float, float]
Quad = tuple[Point, Point, Point, Point]
"""Corners of a line in pixels, from the one above the beginning of its text clockwise."""
_Matrix = tuple[tuple[float, float, float], tuple[float, float, float]]


@dataclass(frozen=True)
class PageFrame:
    """Coordinates in which most lines of a page are horizontal and 12 units high.

    Args:
        angle: radians by which lines are turned clockwise in the picture.
        center, level_center: middle of the picture, and of the picture after it was turned, in pixels.
        unit: pixels.
    """

    angle: float
    center: Point
    level_center: Point
    unit: float

    @property
    def matrix(self) -> _Matrix:
        """The affine matrix from pixels of the picture to pixels of the level one."""
        return _turning(-self.angle, self.center, self.level_center)

    def box_of(self, quad: Quad) -> Box:
        """Return the box of a quad in units. Corners of one side that differ are averaged."""
        points = [_moved(self.matrix, point) for point in quad]
        xs, ys = sorted(x / self.unit for x, _ in points), sorted(y / self.unit for _, y in points)
        return (xs[0] + xs[1]) / 2, (ys[0] + ys[1]) / 2, (xs[2] + xs[3]) / 2, (ys[2] + ys[3]) / 2

    def placed(self, block: Block, scale: float) -> Block:
        """Return a block of the frame with boxes in points. `scale`: pixels per point."""
        lines = tuple(replace(line, box=line.box and self._page_box(line.box, scale)) for line in block.lines)
        return replace(block, box=block.box and self._page_box(block.box, scale), lines=lines)

    def _page_box(self, box: Box, scale: float) -> Box:
        back = _turning(self.angle, self.level_center, self.center)
        points = [_moved(back, (x * self.unit, y * self.unit)) for x in box[::2] for y in box[1::2]]
        left, top, right, bottom = union([(x, y, x, y) for x, y in points])
        return round(left / scale, 2), round(top / scale, 2), round(right / scale, 2), round(bottom / scale, 2)


def inner_box(box: Box) -> Box:
    """Return the box of a line's text in that of its quad."""
    left, top, right, bottom = box
    side = min(bottom - top, right - left)
    across, down = min(_BESIDE * side, (right - left) / 4), _ABOVE * side
    return round(left + across, 2), round(top + down, 2), round(right - across, 2), round(bottom - down, 2)


def outer_quad(box: Box) -> Quad:
    """Return a quad whose `inner_box` is this box of a text."""
    left, top, right, bottom = box
    height, width = (bottom - top) / (1 - 2 * _ABOVE), (right - left) / (1 - 2 * _BESIDE)
    side = height if right - left >= (1 - 2 * _BESIDE) * height else width
    across, down = _BESIDE * side, _ABOVE * side
    left, top, right, bottom = left - across, top - down, right + across, bottom + down
    return (left, top), (right, top), (right, bottom), (left, bottom)


def frame_of(quads: Sequence[Quad], size: tuple[int, int]) -> PageFrame:
    """Return the frame of a page with at least one line. `size`: width and height of its picture in pixels."""
    angle, quarters = _angle(quads)
    width, height = size if quarters % 2 == 0 else size[::-1]
    unit = (1 - 2 * _ABOVE) * median(_height(quad) for quad in quads) / LINE_HEIGHT
    return PageFrame(angle, (size[0] / 2, size[1] / 2), (width / 2, height / 2), max(unit, 0.1))


def _height(quad: Quad) -> float:
    return (math.dist(quad[0], quad[3]) + math.dist(quad[1], quad[2])) / 2


def _angle(quads: Sequence[Quad]) -> tuple[float, int]:
    """Return the angle of most lines in radians, weighted by their length, and the nearest number of quarter turns."""
    turned: list[list[tuple[float, float]]] = [[] for _ in range(4)]  # (skew, length) of lines by quarter turns
    lengths = [0.0] * 4
    for quad in quads:
        (x, y), (v, w) = ((quad[1][axis] - quad[0][axis], quad[2][axis] - quad[3][axis]) for axis in (0, 1))
        angle, length = math.atan2(v + w, x + y), math.dist(quad[0], quad[1])
        quarters = round(angle / (math.pi / 2))
        skew = angle - quarters * math.pi / 2
        lengths[quarters % 4] += length
        if length > _LONG * _height(quad) and abs(skew) < math.radians(_MAX_SKEW):
            turned[quarters % 4].append((skew, length))
    quarters = lengths.index(max(lengths))
    skew = _weighted_median(turned[quarters]) if len(turned[quarters]) >= _LEAST_LINES else 0.0
    return quarters * math.pi / 2 + (skew if abs(skew) >= math.radians(_MIN_SKEW) else 0.0), quarters


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of values with weights."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def _turning(angle: float, center: Point, target: Point) -> _Matrix:
    """Return the matrix that turns the picture clockwise and moves its center."""
    cos, sin, (x, y), (v, w) = math.cos(angle), math.sin(angle), center, target
    return (cos, -sin, v - cos * x + sin * y), (sin, cos, w - sin * x - cos * y)


def _moved(matrix: _Matrix, point: Point) -> Point:
    (a, b, c), (d, e, f) = matrix
    return a * point[0] + b * point[1] + c, d * point[0] + e * point[1] + f
