"""Finds the straight lines that a PDF page draws, such as those of tables, in a codec worker."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_float, c_int
from itertools import pairwise
from typing import Any

Affine = tuple[float, float, float, float, float, float]
"""`(a, b, c, d, e, f)`: a point `(x, y)` becomes `(a x + c y + e, b x + d y + f)`."""
Rule = tuple[float, float, float, float]
"""Left, top, right and bottom of a horizontal or vertical line in points, without its thickness."""
MAX_PATHS = 5000
"""Paths of a page that are looked at. A page with more is a drawing, and none of its lines count."""
_MAX_SEGMENTS = 40_000  # of all paths
_MAX_DEPTH = 3  # of forms in forms
_MIN_LENGTH = 4.0  # points
_MAX_THICKNESS = 3.0  # of a filled rectangle that stands for a line
_STRAIGHT = 0.3  # points by which the ends of a line may differ across it

_Point = tuple[float, float]


def page_rules(page: Any, to_page: Affine) -> tuple[Rule, ...]:
    """Return the horizontal and vertical lines of a page: strokes, and filled rectangles as thin as lines.

    Args:
        page: open page of pypdfium2.
        to_page: from the page's own coordinates to points from its top left corner.
    """
    from pypdfium2 import raw

    count = raw.FPDFPage_CountObjects(page)
    rules, segments = list[Rule](), 0
    objects = (raw.FPDFPage_GetObject(page, index) for index in range(count))
    for paths, (path, matrix) in enumerate(_paths(objects, to_page, _MAX_DEPTH), 1):
        segments += max(raw.FPDFPath_CountSegments(path), 0)
        if paths > MAX_PATHS or segments > _MAX_SEGMENTS:
            return ()
        rules += _rules_of(path, matrix)
    return tuple(sorted(set(rules)))


def _paths(objects: Iterator[Any], matrix: Affine, depth: int) -> Iterator[tuple[Any, Affine]]:
    """Yield the paths among objects and in their forms, with the matrices of their points."""
    from pypdfium2 import raw

    for item in objects:
        kind = raw.FPDFPageObj_GetType(item)
        if kind not in (raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_FORM):
            continue
        own = raw.FS_MATRIX()
        if not raw.FPDFPageObj_GetMatrix(item, byref(own)):
            continue
        inner = _product((own.a, own.b, own.c, own.d, own.e, own.f), matrix)
        if kind == raw.FPDF_PAGEOBJ_PATH:
            yield item, inner
        elif depth:
            count = raw.FPDFFormObj_CountObjects(item)
            yield from _paths((raw.FPDFFormObj_GetObject(item, index) for index in range(max(count, 0))), inner, depth - 1)


def _product(first: Affine, second: Affine) -> Affine:
    """Return the matrix that applies `first`, then `second`."""
    a, b, c, d, e, f = first
    p, q, r, s, t, u = second
    return a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s, e * p + f * r + t, e * q + f * s + u


def _rules_of(path: Any, matrix: Affine) -> Iterator[Rule]:
    from pypdfium2 import raw

    fill, stroke = c_int(), c_int()
    if not raw.FPDFPath_GetDrawMode(path, byref(fill), byref(stroke)):
        return
    for points in _outlines(path, matrix):
        if stroke.value:
            for start, end in pairwise(points):
                yield from _rule((*start, *end), _STRAIGHT)
        elif fill.value and len(set(points)) == 4:
            xs, ys = zip(*points, strict=True)
            yield from _rule((min(xs), min(ys), max(xs), max(ys)), _MAX_THICKNESS)


def _outlines(path: Any, matrix: Affine) -> Iterator[list[_Point]]:
    """Yield the corners of each part of a path that has no curves."""
    from pypdfium2 import raw

    points, is_curved, a, b, c, d, e, f = list[_Point](), False, *matrix
    for index in range(max(raw.FPDFPath_CountSegments(path), 0)):
        segment, x, y = raw.FPDFPath_GetPathSegment(path, index), c_float(), c_float()
        raw.FPDFPathSegment_GetPoint(segment, byref(x), byref(y))
        kind = raw.FPDFPathSegment_GetType(segment)
        if kind == raw.FPDF_SEGMENT_MOVETO:
            if not is_curved:
                yield points
            points, is_curved = [], False
        is_curved = is_curved or kind == raw.FPDF_SEGMENT_BEZIERTO
        points.append((a * x.value + c * y.value + e, b * x.value + d * y.value + f))
        if raw.FPDFPathSegment_GetClose(segment):
            points.append(points[0])
    if not is_curved:
        yield points


def _rule(box: Rule, thickness: float) -> Iterator[Rule]:
    """Yield the line from one corner of a box to the other if the box is long, and no thicker."""
    left, right = sorted((box[0], box[2]))
    top, bottom = sorted((box[1], box[3]))
    if bottom - top <= thickness and right - left >= _MIN_LENGTH:
        middle = round((top + bottom) / 2, 2)
        yield round(left, 2), middle, round(right, 2), middle
    elif right - left <= thickness and bottom - top >= _MIN_LENGTH:
        middle = round((left + right) / 2, 2)
        yield middle, round(top, 2), middle, round(bottom, 2)
