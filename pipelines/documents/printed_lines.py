"""Makes the record of a page from its printed lines, which a classical reader has read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from ...callers.heap import trim_heap
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import Box, PageChar, TextLine, Verticals, cut_line, page_pixels, verticals_of
from ...mm.media.page_rules import Rule
from ...mm.media.picture_rules import picture_rules
from ...mm.media.policy import MediaPolicy
from .blocks import PageRecord
from .confidence import Calibration, CharScores, confidence_of, with_calibration
from .line_recognizer import LineRecognizer, Picture
from .page_blocks import page_blocks
from .page_frame import LINE_HEIGHT, PageFrame, Quad, frame_of, inner_box
from .page_task import PageTask
from .stop import StopSignal
from .text_blocks import reading_order
from .ways import ReaderKind

TALL = 1.5
"""Ratio of height to width of a line above which its text stands on its side."""
_MIN_CONFIDENCE = 0.5  # a page with a lower confidence is doubted
_WIDTH = 0.8  # maximum width of a character, in line heights


@dataclass(frozen=True)
class ReadLine:
    """A line that was read.

    Args:
        quad: its corners.
        scores: of each character except spaces, from 0 to 1; they are not calibrated.
        places: middle of each of these characters, as a share of the line's width; () if they are not known.
    """

    text: str
    quad: Quad
    scores: CharScores
    places: tuple[float, ...] = ()


class PrintedReader(ABC):
    """A PageReader that finds and reads printed lines.

    Args:
        calibration: corrects the scores of words; None leaves them as they are.
    """

    kind: ReaderKind = "lines"
    name: ClassVar[str]

    def __init__(self, calibration: Calibration | None) -> None:
        self._calibration = calibration

    @property
    @abstractmethod
    def version(self) -> str:
        """Of everything on which the lines depend."""

    @property
    def recognizer(self) -> LineRecognizer | None:
        return None

    @abstractmethod
    def lines(self, pixels: Picture, stop: StopSignal) -> list[ReadLine]:
        """Return the lines of a picture `[height, width, 3]` in any order."""

    @cached_property
    def digest(self) -> str:
        return self.version if self._calibration is None else f"{self.version} {self._calibration.digest}"

    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        return [self._read(page, policy, stop) for page in pages]

    def _read(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> PageRecord:
        pixels = stop.run(lambda: run_isolated(page_pixels, page.data, page.number, policy)).numpy()
        lines = self.lines(pixels, stop)
        trim_heap()
        if not lines:
            return page.record()
        frame = frame_of([line.quad for line in lines], (pixels.shape[1], pixels.shape[0]))
        rules = frame_rules(pixels, [inner_box(frame.box_of(line.quad)) for line in lines], frame)
        verticals = verticals_of(rules)
        parts = [part for line in lines for part in _scored_parts(line, frame, verticals)]
        blocks = page_blocks(
            [part for part, _ in parts], [scores for _, scores in parts], reading_order, rules, "reader", self.name
        )
        blocks = with_calibration(blocks, self._calibration)
        confidence = confidence_of(line for block in blocks for line in block.lines)
        is_doubtful = confidence is not None and confidence < _MIN_CONFIDENCE
        doubt = f"the mean confidence of its words is {confidence:.2f}" if is_doubtful else None
        return page.record(tuple(frame.placed(block, page.scale) for block in blocks), doubt=doubt, confidence=confidence)

    def text(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> str:
        """Return the text of a page in reading order, with an empty line between its blocks."""
        return self._read(page, policy, stop).text

    def line_length(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> float:
        """Return the total length of the lines on a page, each in units of its height."""
        pixels = stop.run(lambda: run_isolated(page_pixels, page.data, page.number, policy)).numpy()
        shapes = [math.dist(*line.quad[:2]) / max(math.dist(*line.quad[1:3]), 1e-6) for line in self.lines(pixels, stop)]
        return sum(max(shape, 1 / max(shape, 1e-6)) for shape in shapes)


def _scored_parts(line: ReadLine, frame: PageFrame, verticals: Verticals) -> Iterator[tuple[TextLine, CharScores]]:
    """Yield the parts of a line with the scores of their characters."""
    at = 0
    for part in line_parts(line, frame, verticals):
        count = sum(map(len, part.text.split()))
        yield part, line.scores[at : at + count]
        at += count


def line_parts(line: ReadLine, frame: PageFrame, verticals: Verticals) -> Iterator[TextLine]:
    """Yield a line in units of the frame: in parts where words stand far apart, with the places where it may be cut."""
    text, quad_box = line.text.strip(), frame.box_of(line.quad)
    left, top, right, bottom = inner_box(quad_box)
    height = bottom - top
    if not line.places or height > TALL * (right - left):
        yield TextLine(" ".join(text.split()), (left, top, right, bottom), round(height, 2))
        return
    middles = [quad_box[0] + place * (quad_box[2] - quad_box[0]) for place in line.places]
    steps = sorted(after - before for before, after in pairwise(middles))
    width = min(steps[len(steps) // 4] if steps else height, _WIDTH * height)  # most neighbours are letters of one word
    left, right = max(left, middles[0] - width), min(right, middles[-1] + width)  # a box may end behind its text
    chars, places = list[PageChar](), iter(middles)
    for char in text:
        middle = left if char.isspace() else next(places)
        chars.append(PageChar(char, (max(middle - width / 2, left), top, min(middle + width / 2, right), bottom)))
    chars[0] = PageChar(text[0], (left, *chars[0].box[1:]))
    chars[-1] = PageChar(text[-1], (*chars[-1].box[:2], right, bottom))
    yield from cut_line(chars, verticals)


def frame_rules(pixels: Picture, boxes: Sequence[Box], frame: PageFrame) -> tuple[Rule, ...]:
    """Return the lines that a picture shows, in units of the frame. `boxes`: of its text."""
    if find_spec("cv2") is None:  # it comes with RapidOCR
        return ()
    import cv2

    grey: Any = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)
    if frame.angle:
        size = (round(2 * frame.level_center[0]), round(2 * frame.level_center[1]))
        grey = cv2.warpAffine(grey, np.array(frame.matrix), size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    found = picture_rules(grey, LINE_HEIGHT * frame.unit, [_scaled(box, frame.unit) for box in boxes])
    return tuple(_scaled(rule, 1 / frame.unit) for rule in found)


def _scaled(box: Box, factor: float) -> Box:
    left, top, right, bottom = (round(side * factor, 2) for side in box)
    return left, top, right, bottom
