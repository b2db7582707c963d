"""Elements that answers name: boxes, points, layout elements and tables, in pixels of the original image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

HTML_BOX = "data-bbox"
"""The attribute that distinguishes HTML with boxes from JSON."""
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?")


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `row` and `column`, counted from 0, are those of its upper left corner."""

    row: int
    column: int
    text: str
    row_span: int = 1
    column_span: int = 1
    header: bool = False


@dataclass(frozen=True)
class Element:
    """A box, point, layout element or table that an answer names.

    Args:
        label: what the model calls it, such as "cup" or "section_header"; "" without a name.
        text: its content, for models that read documents; of several boxes for one content, the first has it and its cells.
        box: left, top, right and bottom; None if the answer gives points only.
        points: `(x, y)` of a point, or of the corners of a polygon.
        cells: cells of a table, row by row.
        image: index of the image in the prompt; of the video, if `time` is given.
        time: seconds of the video at which the element is there; None in an image.
        track: number of the object, the same in all frames; None if the format does not number objects.
        angle: degrees by which its content is turned clockwise, 0, 90, 180 or 270; None if the answer does not say.
        span: start and end of its markup and content in the answer with its special tokens; (0, 0) in formats without content.
    """

    label: str = ""
    text: str = ""
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()
    cells: tuple[Cell, ...] = ()
    image: int = 0
    time: float | None = None
    track: int | None = None
    angle: int | None = None
    span: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)

    def fields(self) -> dict[str, Any]:
        """Return what callers see of it, without `span`."""
        values = asdict(self)
        del values["span"]
        return values


@dataclass(frozen=True)
class ImageScale:
    """`(height, width)` of an image of the prompt in pixels: the original and what the processor resized it to.

    `is_video`: it is that of a video's frames.
    """

    size: tuple[int, int]
    resized: tuple[int, int]
    index: int = 0
    is_video: bool = False

    def point(self, x: float, y: float, across: float, down: float) -> tuple[float, float]:
        """Convert x, from 0 to `across`, and y, from 0 to `down`, to pixels of the original image, clamped to it."""
        height, width = self.size
        return min(max(x / across, 0.0), 1.0) * width, min(max(y / down, 0.0), 1.0) * height

    def element(self, numbers: Sequence[float], across: float, down: float, label: str = "", text: str = "") -> Element | None:
        """Return the element of 2 numbers (a point), 4 (a box) or 8 (a polygon): x, y, ... in units of `point`; else None."""
        if len(numbers) not in (2, 4, 8):
            return None
        points = tuple(self.point(x, y, across, down) for x, y in zip(numbers[::2], numbers[1::2], strict=True))
        xs, ys = [x for x, _ in points], [y for _, y in points]
        box = (min(xs), min(ys), max(xs), max(ys)) if len(points) > 1 else None
        return Element(label, text, box, () if len(points) == 2 else points, image=self.index)


def numbers_of(text: str) -> list[float]:
    """Return the numbers in a text, in order."""
    return [float(number) for number in _NUMBER.findall(text)]


def finite_numbers(value: object) -> list[float]:
    """Return the numbers of a parsed JSON list; none if it holds anything else."""
    if not isinstance(value, list) or len(value) > 8:
        return []
    good = all(isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < 1e9 for number in value)
    return [float(number) for number in value] if good and all(map(isfinite, value)) else []
