"""Readers of page pictures: a classical reader, a model, or none."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from ...callers.errors import ErrorInfo, InputError
from ...engine.sampling_params import RepetitionDetectionParams, SamplingParams
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import page_pixels
from ...mm.media.policy import MediaPolicy
from .answers import answer_blocks
from .blocks import Block, PageRecord
from .confidence import load_calibration, with_token_confidences
from .doubt import SPARE, num_characters, why_invented, why_refusal
from .line_recognizer import LineRecognizer
from .lines_reader import PACKAGES, LinesReader
from .model_answers import FINISH_DOUBTS, error_of, image_of, info_of, model_name, tokens_of
from .options import AUTO, ReadOptions
from .page_task import PageReader, PageTask
from .printed_lines import PrintedReader
from .region_reader import RegionReader
from .spreads import RATIOS, gutter_of
from .stop import ReadingStopped, StopSignal
from .tesseract_reader import TesseractReader, is_installed
from .ways import INSTALL, ReaderKind, why_broken

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.frontend.adapters import AdapterChoice
    from ..ocr import Page, ReadDraft
    from ..run import Task

_log = logging.getLogger("sensorium")
_ENGINE_OPTIONS = (
    "dtype", "quantization", "kv_cache_dtype", "mm_processor_kwargs", "hf_overrides", "generation_config",
    "override_generation_config",
)  # fmt: skip
"""Options of the engine that change answers."""
_LOOPS = RepetitionDetectionParams(min_repeats=16, min_tokens=1024, repair=True)
"""Loops that are removed from answers. Empty cells and lines of forms also repeat, but for fewer tokens."""


class NoReader:
    """Stands for a reader where none is installed, and no model is given."""

    kind: ReaderKind = "none"
    digest = name = "none"
    recognizer = None

    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        return [page.record(error=ErrorInfo("unsupported", f"{page.reason}; {INSTALL}")) for page in pages]


class ModelReader:
    """Reads pages with `ocr`. Their drafts are their text layers, or the printed lines if the reader of lines is installed.

    Args:
        options: `question` is the prompt beside each page, or a name of `TWO_STEPS`; `reader` finds the printed lines.
        run: returns the results of tasks; None runs them in this thread.
        adapter: of the requests for all pages. Records depend on its content.

    Raises:
        InputError: the question names another model's prompt, or needs the reader of printed lines, which is not installed; the
            calibration is not that of the model and question; the model does not chat, or the engine sleeps or was closed.
        EngineDeadError: the engine's process has ended.
    """

    kind: ReaderKind = "model"

    def __init__(
        self,
        engine: Engine,
        options: ReadOptions,
        run: Callable[[list[Task[Page]]], list[Page]] | None = None,
        adapter: AdapterChoice = None,
    ) -> None:
        from ..ocr import OcrOptions
        from ..ocr_prompts import find_prompt
        from ..two_steps import find_two_steps

        question = options.question
        two_steps = find_two_steps(question, engine.ocr_prompts)  # raised before any page is read: it is no error of a page
        if two_steps is None:
            find_prompt(question, engine.ocr_prompts)
        engine.chat_options()
        engine.loop.check_ready(())
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, repetition_detection=_LOOPS)
        self._engine, self._run = engine, run or self._run_all
        self._options = OcrOptions(question, options.max_tokens, params, cache_salt=options.cache_salt)
        self._calibration = None if options.calibration is None else load_calibration(options.calibration, self.name, question)
        self._lines_reader = find_lines_reader(options.reader)  # its lines are drafts, and show where the model invents text
        if two_steps is not None and two_steps.layout is None and self._lines_reader is None:
            reason = f"<<param=>>{question!r} takes the regions of pages from the reader of printed lines"
            raise InputError(f"{reason}; pip install 'sensorium[documents]'", param="question", code="unsupported")
        self._lease = None if adapter is None else engine.adapters.lease(adapter)  # kept: all pages use this content
        if self._lease is not None:
            self._lease.load()
        self._regions = None
        if two_steps is not None:
            lines, calibration = self._lines_reader, self._calibration
            self._regions = RegionReader(engine, two_steps, self._options, self._run_leased, lines, calibration)

    @property
    def recognizer(self) -> LineRecognizer | None:
        return None if self._lines_reader is None else self._lines_reader.recognizer

    @property
    def name(self) -> str:
        return model_name(str(self._engine.config.model))

    def _run_all(self, tasks: list[Task[Page]]) -> list[Page]:
        from ..run import run_all

        return run_all(self._engine, tasks, False)

    @cached_property
    def digest(self) -> str:
        config = self._engine.config
        values = {
            "checkpoints": self._engine.checkpoint_digests,
            **({} if self._lease is None else {"request_adapter": self._lease.identity}),
            "chat_template": self._engine.tokenizer.chat_template,
            "question": self._options.question,
            "max_tokens": self._options.max_tokens,
            **({} if self._lines_reader is None else {"finder": self._lines_reader.digest}),
            **({} if self._calibration is None else {"calibration": self._calibration.digest}),
            **{name: getattr(config, name) for name in _ENGINE_OPTIONS},
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=_plain).encode()).hexdigest()

    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        if self._regions is not None:
            records = self._regions.read(pages, policy, stop)
        else:
            records = self._read_whole(pages, policy, stop)
        return [self._checked(page, record, policy, stop) for page, record in zip(pages, records, strict=True)]

    def _read_whole(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        """Return the records of pages, each of which is read by one request, or by two if it shows two pages of a book."""
        from ..ocr import ocr_tasks

        tasks: list[Task[Page]] = []
        edges = list[tuple[int, ...]]()  # left edges of the parts of each page, in pixels
        for page in pages:
            parts = self._parts_of(page, policy, stop)
            edges.append(tuple(left for left, _ in parts))
            draft = self._draft_of(page, policy, stop) if len(parts) == 1 else str  # "": none
            tasks += ocr_tasks(self._engine, [image for _, image in parts], self._options, [draft] * len(parts))
        results = iter(self._run_leased(tasks))
        return [self._record(page, [(left, next(results)) for left in lefts]) for page, lefts in zip(pages, edges, strict=True)]

    def _parts_of(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> list[tuple[int, object]]:
        """Return the images that a page is read as, with their left edges: itself, or the two pages of a spread."""
        whole, facts = [(0, image_of(page))], page.facts
        if facts.num_chars or not RATIOS[0] < facts.width / max(facts.height, 1e-6) < RATIOS[1]:
            return whole
        try:
            pixels = stop.run(lambda: run_isolated(page_pixels, page.data, page.number, policy)).numpy()
        except ReadingStopped:
            raise
        except Exception:  # its request will tell the reason
            return whole
        if (gutter := gutter_of(pixels)) is None:
            return whole
        return [(0, np.ascontiguousarray(pixels[:, :gutter])), (gutter, np.ascontiguousarray(pixels[:, gutter:]))]

    def _run_leased(self, tasks: list[Task[Page]]) -> list[Page]:
        """Return the results of tasks, whose requests use the reader's adapter."""
        from ..with_adapter import with_adapters

        return self._run(with_adapters(self._engine, tasks, self._lease))

    def _draft_of(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> ReadDraft | None:
        """Return a function that reads the printed lines of a page as its draft, None if its text layer is the draft.

        The lines are read on the CPU. A model on a GPU gets no such drafts, because it is faster than that.
        """
        has_layer = page.facts.num_chars and not why_broken(page.facts)
        if self._lines_reader is None or has_layer or self._engine.config.torch_device.type != "cpu":
            return None
        return partial(self._lines_reader.text, page, policy, stop)

    def _checked(self, page: PageTask, record: PageRecord, policy: MediaPolicy, stop: StopSignal) -> PageRecord:
        """Return the record of a page, with a doubt if its text is probably invented, as on blank or noisy pages."""
        reader = self._lines_reader
        if reader is None or record.doubt or page.facts.num_chars or num_characters(record.blocks) <= SPARE:
            return record
        try:
            return replace(record, doubt=why_invented(record.blocks, reader.line_length(page, policy, stop)))
        except ReadingStopped:
            raise
        except Exception:  # the page keeps its reading, without this check
            _log.exception("the lines of a page could not be found")
            return record

    def _record(self, page: PageTask, results: Sequence[tuple[int, Page]]) -> PageRecord:
        """Return the record of a page. An answer that cannot be read as blocks is an error of this page alone.

        Args:
            results: of each part of the page, with its left edge in pixels.
        """
        blocks, tokens, doubts = list[Block](), list[tuple[str, float]](), list[str]()
        for left, result in results:
            if result.error is not None:
                return page.record(error=error_of(result), doubt=result.doubt)
            marked = result.output.outputs[0].marked
            try:
                part = answer_blocks(result.text, marked, page.scale, self.name) if result.text else ()
            except Exception as error:
                return page.record(error=info_of(error))
            blocks += [_shifted(block, left / page.scale) for block in part]
            tokens += tokens_of(result)
            doubts += filter(None, (result.doubt, FINISH_DOUBTS.get(result.finish_reason or ""), why_refusal(result.text)))
        scored, confidence = with_token_confidences(blocks, tokens, self._calibration)
        return page.record(scored, doubt=next(iter(doubts), None), confidence=confidence)


def _shifted(block: Block, distance: float) -> Block:
    """Return a block that is moved to the right by points."""
    if block.box is None or not distance:
        return block
    left, top, right, bottom = block.box
    return replace(block, box=(round(left + distance, 2), top, round(right + distance, 2), bottom))


def _plain(value: object) -> object:
    """Return a value of an engine's option as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


def find_reader(options: ReadOptions) -> PageReader:
    """Return the reader of printed lines that the options name, or that is installed; else NoReader.

    Raises:
        InputError: it is named, and not installed; or the calibration is not that of the reader.
    """
    reader = find_lines_reader(options.reader)
    if options.calibration is None:
        return reader or NoReader()
    calibration = load_calibration(options.calibration, "none" if reader is None else reader.name)
    if isinstance(reader, TesseractReader):
        return TesseractReader(options.reader.partition(":")[2], calibration)
    return LinesReader(calibration)


def find_lines_reader(name: str = AUTO) -> PrintedReader | None:
    """Return a reader of printed lines: RapidOCR, or tesseract if only that is installed, or the one that is named.

    Args:
        name: see `ReadOptions.reader`.

    Raises:
        InputError: it is named, and not installed.
    """
    kind, _, languages = name.partition(":")
    has_rapidocr = all(find_spec(package) is not None for package in PACKAGES)
    if kind == "tesseract":
        return TesseractReader(languages)
    if kind == AUTO and not has_rapidocr and is_installed():
        try:
            return TesseractReader()
        except InputError as error:  # it has no data of any language
            _log.warning("tesseract cannot be used: %s", error)
            return None
    if kind != AUTO and not has_rapidocr:
        reason = f"<<param=>>{name}: RapidOCR is not installed; pip install 'sensorium[documents]'"
        raise InputError(reason, param="reader", code="unsupported")
    return LinesReader() if has_rapidocr else None
