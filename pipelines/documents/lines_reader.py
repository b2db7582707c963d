"""Reads printed pages line by line with RapidOCR: the small PP-OCRv6 models of its package, on the CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...callers.heap import trim_heap
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import Box, PageChar, TextLine, Verticals, cut_line, page_pixels, verticals_of
from ...mm.media.page_rules import Rule
from ...mm.media.picture_rules import picture_rules
from ...mm.media.policy import MediaPolicy
from .blocks import PageRecord
from .confidence import CharScores, confidence_of
from .line_recognizer import LineRecognizer, Picture
from .page_blocks import page_blocks
from .page_frame import LINE_HEIGHT, PageFrame, Point, Quad, frame_of, inner_box
from .page_task import PageTask
from .stop import StopSignal
from .text_blocks import reading_order
from .ways import ReaderKind

PACKAGES = ("rapidocr", "onnxruntime")
_MIN_CONFIDENCE = 0.5  # a page with a lower confidence is doubted
_TALL = 1.5  # ratio of height to width; RapidOCR turns taller lines by a quarter before it reads them
_WIDTH = 0.8  # maximum width of a character, in line heights
_SQUEEZED = 4.0  # ratio of width to height that the classifier of turned lines sees; wider pictures would be squeezed
_SURE = 0.8  # share of lines, weighted by score, with one direction, above which the classifier is sure
_SAMPLE = 4  # lines that are read in both directions if the classifier is unsure


def _drop_memory_plans(stage: Any) -> None:
    """Load the onnxruntime session of a stage again without memory plans.

    onnxruntime keeps a plan for each shape of its input. Lines of text have thousands of widths, so memory grew with the pages.
    """
    session = getattr(stage, "session", None)  # None: not onnxruntime
    if session is not None:
        options, kind, path = session.get_session_options(), type(session), session._model_path
        options.enable_mem_pattern = False
        providers = session.get_providers()
        stage.session = session = None  # frees the first one before the second is made
        stage.session = kind(path, sess_options=options, providers=providers)


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


@dataclass(frozen=True)
class PageTurns:
    """The direction of a page's lines in its picture: from bottom to top or from top to bottom, and upside down."""

    is_sideways: bool = False
    is_upside_down: bool = False


class LinesReader:
    """Finds and reads printed lines."""

    kind: ReaderKind = "lines"
    name = "rapidocr"

    def __init__(self) -> None:
        self._lock, self._stop = threading.Lock(), StopSignal()  # `_stop`: of the page that is read
        self._turns = PageTurns()  # of the page that is read

    @cached_property
    def digest(self) -> str:
        return " ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)

    @cached_property
    def _engine(self) -> Any:
        from rapidocr import RapidOCR

        # one line per batch: without the padding of shorter ones it takes less time and memory, and a line's text is its own
        options = {"Global.log_level": "error", "Global.return_word_box": True, "Rec.rec_batch_num": 1}
        engine = RapidOCR(params=options)
        engine.cal_rec_boxes, engine.cls_and_rotate = _with_places, partial(self._turned, engine)
        engine.crop_text_regions = partial(self._cropped, engine.crop_text_regions)
        for stage in (engine._load_det_model(), engine._load_cls_model(), engine._load_rec_model()):
            _drop_memory_plans(stage.session)
            stage.session = partial(self._run_stage, stage.session)
        return engine

    @property
    def recognizer(self) -> LineRecognizer:
        return self

    @cached_property
    def alphabet(self) -> frozenset[str]:
        return frozenset(self._engine.text_rec.postprocess_op.character)

    def recognize(self, pictures: Sequence[Picture], stop: StopSignal) -> list[tuple[str, float]]:
        if not pictures:
            return []
        with self._lock:
            self._stop = stop
            result = self._engine.recognize_txt([picture[..., ::-1] for picture in pictures])  # BGR, as OpenCV
        trim_heap()  # pictures of so many sizes leave holes in the heap
        return [(str(text), float(score)) for text, score in zip(result.txts, result.scores, strict=True)]

    def _run_stage(self, session: Callable[[object], object], batch: object) -> object:
        """Run one of a page's many batches, unless the reading was stopped."""
        self._stop.check()
        return session(batch)

    def _cropped(self, crop: Callable[..., list[Picture]], pixels: Picture, boxes: NDArray[np.float32]) -> list[Picture]:
        """Return the pictures of a page's lines. RapidOCR turns tall ones; short lines of such a page have to follow."""
        pictures = crop(pixels, boxes)
        shapes = [_shape(box) for box in boxes]
        self._turns = PageTurns(
            is_sideways=sum(shape >= _TALL for shape in shapes) > sum(shape <= 1 / _TALL for shape in shapes)
        )
        if not self._turns.is_sideways:
            return pictures
        pairs = zip(pictures, shapes, strict=True)
        return [np.rot90(picture) if 1 / _TALL < shape < _TALL else picture for picture, shape in pairs]

    def _turned(self, engine: Any, pictures: list[Picture]) -> tuple[list[Picture], Any]:
        """Turn the pictures of a page's lines if most of them are upside down, in place of RapidOCR's `cls_and_rotate`.

        RapidOCR turns each line by itself, and is often wrong about long ones, because its classifier sees them squeezed. Here,
        the classifier sees only their starts. If it is unsure about the page, some lines are read in both directions.
        """
        starts = [picture[:, : max(round(_SQUEEZED * picture.shape[0]), 1)] for picture in pictures]
        result = engine.text_cls(starts)
        turned = sum(float(score) for label, score in result.cls_res if label == "180")
        share = turned / max(sum(float(score) for _, score in result.cls_res), 1e-6)
        is_turned = share > 0.5 if abs(share - 0.5) > _SURE - 0.5 else _reads_better_turned(engine, starts)
        self._turns = replace(self._turns, is_upside_down=is_turned)
        return [_upside_down(picture) if is_turned else picture for picture in pictures], result

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
        confidence = confidence_of(line for block in blocks for line in block.lines)
        is_doubtful = confidence is not None and confidence < _MIN_CONFIDENCE
        doubt = f"the mean confidence of its words is {confidence:.2f}" if is_doubtful else None
        return page.record(tuple(frame.placed(block, page.scale) for block in blocks), doubt=doubt, confidence=confidence)

    def text(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> str:
        """Return the text of a page in reading order, with an empty line between its blocks."""
        return self._read(page, policy, stop).text

    def line_length(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> float:
        """Return the total length of the lines on a page, each in units of its height. Lines are found, but not read."""
        pixels = stop.run(lambda: run_isolated(page_pixels, page.data, page.number, policy)).numpy()
        with self._lock:
            self._stop = stop
            boxes = self._engine(pixels[..., ::-1], use_cls=False, use_rec=False).boxes
        shapes = () if boxes is None else map(_shape, boxes)
        return sum(max(shape, 1 / max(shape, 1e-6)) for shape in shapes)

    def lines(self, pixels: Picture, stop: StopSignal) -> list[ReadLine]:
        """Return the lines of a picture `[height, width, 3]` in any order."""
        with self._lock:
            self._stop = stop
            result = self._engine(pixels[..., ::-1])  # it takes BGR, as OpenCV does
            turns = self._turns
        if result.boxes is None or result.txts is None:
            return []
        lines = list[ReadLine]()
        for corners, text, score, words in zip(result.boxes, result.txts, result.scores, result.word_results, strict=True):
            if text.strip():
                quad = _text_quad([(float(x), float(y)) for x, y in corners], turns)
                places, scores = words[0][0]
                lines.append(ReadLine(text, quad, scores or (float(score),) * sum(map(len, text.split())), places))
        return lines


def _reads_better_turned(engine: Any, pictures: Sequence[Picture]) -> bool:
    """Return whether the widest of some lines have higher scores if they are turned upside down."""
    sample = sorted(pictures, key=lambda picture: picture.shape[1], reverse=True)[:_SAMPLE]
    upright, turned = (sum(map(float, engine.recognize_txt(lines).scores)) for lines in (sample, [*map(_upside_down, sample)]))
    return turned > upright


def _upside_down(picture: Picture) -> Picture:
    return np.ascontiguousarray(picture[::-1, ::-1])


def _text_quad(corners: Sequence[Point], turns: PageTurns) -> Quad:
    """Return the corners of a line, which RapidOCR orders by their places on the page, in the order of its text."""
    is_tall = _shape(corners) >= (1 / _TALL if turns.is_sideways else _TALL)
    first = is_tall + 2 * turns.is_upside_down
    a, b, c, d = (corners[(first + i) % 4] for i in range(4))
    return a, b, c, d


def _shape(corners: Any) -> float:
    """Return the ratio of a line's height to its width on the page."""
    a, b, c, d = corners
    return max(math.dist(a, d), math.dist(b, c)) / max(math.dist(a, b), math.dist(c, d), 1e-6)


def _with_places(images: object, boxes: object, result: Any, single: bool) -> Any:
    """Return a result of recognition that has the places and scores of each line's characters in place of RapidOCR's words."""
    result.word_results = tuple(
        [((_places(text, info), _scores(text, info)), None, True)]
        for text, info in zip(result.txts, result.word_results, strict=True)
    )
    return result


def _places(text: str, info: Any) -> tuple[float, ...]:
    """Return the middle of each character except spaces, as a share of the line's width; () if they do not fit the text.

    They are the steps of the recognition's output in which the characters stand.
    """
    steps = [step for word in info.word_cols for step in word]
    if len(steps) != sum(not char.isspace() for char in text) or not info.line_txt_len:
        return ()
    return tuple(min((step + 0.5) / info.line_txt_len, 1.0) for step in steps)


def _scores(text: str, info: Any) -> CharScores:
    """Return the score of each character except spaces; () if they do not fit the text."""
    if len(info.confs) != len(text):
        return ()
    return tuple(round(float(score), 4) for char, score in zip(text, info.confs, strict=True) if not char.isspace())


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
    if not line.places or height > _TALL * (right - left):
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
