"""Reads printed pages line by line with RapidOCR: the small PP-OCRv6 models of its package, on the CPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...callers.heap import trim_heap
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import page_pixels
from ...mm.media.policy import MediaPolicy
from .confidence import RAPIDOCR, Calibration, CharScores
from .line_recognizer import LineRecognizer, Picture
from .page_frame import Point, Quad
from .page_task import PageTask
from .printed_lines import TALL, PrintedReader, ReadLine
from .stop import StopSignal

PACKAGES = ("rapidocr", "onnxruntime")
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
class PageTurns:
    """The direction of a page's lines in its picture: from bottom to top or from top to bottom, and upside down."""

    is_sideways: bool = False
    is_upside_down: bool = False


class LinesReader(PrintedReader):
    """Finds and reads printed lines with RapidOCR.

    Args:
        calibration: corrects the scores of words; None leaves them as they are.
    """

    name = "rapidocr"

    def __init__(self, calibration: Calibration | None = RAPIDOCR) -> None:
        super().__init__(calibration)
        self._lock, self._stop = threading.Lock(), StopSignal()  # `_stop`: of the page that is read
        self._turns = PageTurns()  # of the page that is read

    @cached_property
    def version(self) -> str:
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
        self._turns = PageTurns(is_sideways=sum(shape >= TALL for shape in shapes) > sum(shape <= 1 / TALL for shape in shapes))
        if not self._turns.is_sideways:
            return pictures
        pairs = zip(pictures, shapes, strict=True)
        return [np.rot90(picture) if 1 / TALL < shape < TALL else picture for picture, shape in pairs]

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
    is_tall = _shape(corners) >= (1 / TALL if turns.is_sideways else TALL)
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
