"""Finds the straight horizontal and vertical lines that the picture of a page shows, such as those of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .page_rules import Rule

MAX_RULES = 2000
"""Maximum number of lines in a picture. A picture with more lines is a drawing, and its lines are ignored."""
_MAX_SIDE = 2600  # pixels; a larger picture is scaled down
_AROUND = 3.0  # side of the square with which a pixel is compared, in line heights
_CONTRAST = 32  # least difference in brightness between a line and its surroundings, of 255
_LEAST_HEIGHTS = 8  # line heights in the picture's longer side, at least; this bounds the time
_GAP = 0.08  # maximum gap in a line, in line heights
_ACROSS, _DOWN = 2.0, 1.2  # minimum lengths of horizontal and vertical lines, in line heights
_THICKNESS = 0.35  # maximum thickness of a line, in line heights
_EDGE = 0.2  # share of a text box's height at its upper and lower edge in which a rule may be
_STROKE = 1.4  # longest vertical stroke of a letter, in heights of its text box
_COVERED = 0.6  # minimum share of a letter's stroke that is inside of text boxes

_Boxes = NDArray[np.float64]


def picture_rules(grey: NDArray[np.uint8], line_height: float, lines: Sequence[Rule] = ()) -> tuple[Rule, ...]:
    """Return the horizontal and vertical lines of a picture, as boxes in pixels without their thickness.

    The time depends on the number of pixels (at most 2,600 x 2,600), not on what they show.

    Args:
        grey: `[height, width]`; its lines are horizontal and vertical to within their thickness.
        line_height: height of the page's lines of text in pixels, the unit of the limits above.
        lines: boxes of lines of text. Strokes of their letters, such as those of a large T, are left out.
    """
    import cv2

    scale = min(_MAX_SIDE / max(grey.shape), 1.0)
    if scale < 1.0:
        size = (max(round(grey.shape[1] * scale), 1), max(round(grey.shape[0] * scale), 1))
        grey = cv2.resize(grey, size, interpolation=cv2.INTER_AREA)  # type: ignore[assignment]
    height = min(max(line_height * scale, 1.0), max(grey.shape) / _LEAST_HEIGHTS)
    mask, texts = _dark(grey, height), np.array(lines, np.float64).reshape(-1, 4) * scale
    across = _segments(mask, height, _ACROSS)
    down = _segments(np.ascontiguousarray(mask.T), height, _DOWN)
    if len(across) + len(down) > MAX_RULES:
        return ()
    across = across[~_are_strokes(across, texts, np.inf)]
    down = down[~_are_strokes(down, texts[:, [1, 0, 3, 2]], _STROKE)]
    horizontal = ((left, (top + bottom) / 2, right, (top + bottom) / 2) for left, top, right, bottom in across / scale)
    vertical = (((left + right) / 2, top, (left + right) / 2, bottom) for top, left, bottom, right in down / scale)
    rules = {tuple(round(float(side), 2) for side in rule) for rule in (*horizontal, *vertical)}
    return tuple((left, top, right, bottom) for left, top, right, bottom in sorted(rules))


def _dark(grey: NDArray[np.uint8], height: float) -> NDArray[np.uint8]:
    """Return which pixels are darker than their surroundings, as 0 and 255."""
    import cv2

    side = max(round(_AROUND * height), 3)
    around = cv2.blur(grey, (side, side))
    mask = (cv2.subtract(around, grey) > _CONTRAST).astype(np.uint8)
    return mask * np.uint8(255)


def _segments(mask: NDArray[np.uint8], height: float, length: float) -> _Boxes:
    """Return the boxes `[segments, 4]` of horizontal lines that are at least `length` line heights long.

    A line that is not quite level is a staircase of short runs of pixels: runs of three rows count together.
    """
    import cv2

    gap, least = max(round(_GAP * height), 1), max(round(length * height), 3)
    joined = cv2.morphologyEx(mask, cv2.MORPH_CLOSE, np.ones((1, gap + 1), np.uint8))
    joined = cv2.dilate(joined, np.ones((3, 1), np.uint8))
    runs = cv2.morphologyEx(joined, cv2.MORPH_OPEN, np.ones((1, least), np.uint8))
    runs = cv2.bitwise_and(runs, joined)
    _, _, stats, _ = cv2.connectedComponentsWithStats(runs, connectivity=8)
    found: NDArray[Any] = stats[1:]
    left, top, wide, tall, area = (found[:, i].astype(np.float64) for i in range(5))
    thickness = area / np.maximum(wide, 1) - 2  # the dilation has added two pixels
    keep = (thickness <= max(_THICKNESS * height, 3)) & (tall <= np.maximum(0.03 * wide, max(2 * _THICKNESS * height, 5)))
    boxes = np.stack([left, top, left + wide, top + tall], axis=1)
    chosen: _Boxes = boxes[keep & (wide >= least)]
    return chosen


def _are_strokes(segments: _Boxes, texts: _Boxes, longest: float) -> NDArray[np.bool_]:
    """Return which horizontal segments are strokes of letters: mostly inside of boxes of lines of text.

    Args:
        longest: stroke in heights of its box.
    """
    covered, middle = np.zeros(len(segments)), (segments[:, 1] + segments[:, 3]) / 2
    length = segments[:, 2] - segments[:, 0]
    for left, top, right, bottom in texts:
        margin = _EDGE * min(bottom - top, right - left)
        is_inside = (middle > top + margin) & (middle < bottom - margin) & (length <= longest * (bottom - top))
        shared = np.minimum(segments[:, 2], right) - np.maximum(segments[:, 0], left)
        covered += np.where(is_inside, np.maximum(shared, 0), 0)
    return covered > _COVERED * length
