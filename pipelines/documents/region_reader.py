"""Reads pages in two steps: the regions of each page are found first, then each region is read by a request of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...engine.elements import Element
from ...engine.sampling_params import SamplingParams
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import Box, page_pixels
from ...mm.media.policy import MediaPolicy
from ...mm.types import Media
from ..two_steps import TwoSteps
from .answers import kind_of, region_blocks
from .blocks import PageRecord
from .confidence import Calibration, with_token_confidences
from .doubt import why_refusal
from .model_answers import FINISH_DOUBTS, error_of, image_of, info_of, model_name, tokens_of
from .page_task import PageTask
from .printed_lines import PrintedReader
from .regions import WHOLE_PAGE, layout_regions, printed_regions, region_picture, text_in
from .stop import ReadingStopped, StopSignal
from .ways import why_broken

if TYPE_CHECKING:
    from PIL import Image

    from ...engine.engine import Engine
    from ..ocr import OcrOptions, Page
    from ..run import Task

RunTasks = Callable[[list["Task[Page]"]], list["Page"]]
_NO_TEXT = "[Non-Text]"  # MinerU's answer about a region without text


@dataclass
class _PageRegions:
    """A page and its regions.

    Args:
        record: its result, if it has one before its regions are read: an error.
        doubt: why its layout is probably wrong.
        lines: returns lines with boxes in points, from which drafts of its regions are made.
    """

    page: PageTask
    regions: list[Element] = field(default_factory=list)
    record: PageRecord | None = None
    doubt: str | None = None
    lines: Callable[[], Sequence[tuple[str, Box]]] = lambda: ()


@dataclass(frozen=True)
class RegionReader:
    """Reads pages in two steps.

    Args:
        options: of the requests; the question is replaced by the prompt of each step.
        run: returns the results of tasks.
        lines_reader: reads printed lines, which are drafts on a CPU, and the regions if the model finds none itself.
        calibration: turns the probabilities of words into confidences.
    """

    engine: Engine
    two_steps: TwoSteps
    options: OcrOptions
    run: RunTasks
    lines_reader: PrintedReader | None
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        return model_name(str(self.engine.config.model))

    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        """Return the records of pages. An error of one region is the error of its page."""
        found = self._by_layout(pages, stop, policy) if self.two_steps.layout else self._by_lines(pages, policy, stop)
        tasks: list[Task[Page]] = []
        counts = list[int]()
        for page in found:
            tasks += (requests := self._region_tasks(page, policy, stop))
            counts.append(len(requests))
        results = iter(self.run(tasks) if tasks else ())
        return [self._record(page, [next(results) for _ in range(count)]) for page, count in zip(found, counts, strict=True)]

    def _by_layout(self, pages: Sequence[PageTask], stop: StopSignal, policy: MediaPolicy) -> list[_PageRegions]:
        """Return pages with the regions that the model finds."""
        from ..ocr import ocr_tasks

        assert self.two_steps.layout is not None
        options = self._options_for(self.two_steps.layout, "layout")
        images = [self._layout_image(page) for page in pages]
        results = self.run(ocr_tasks(self.engine, images, options, [str] * len(pages)))  # "": without a draft
        return [self._with_layout(page, result, policy, stop) for page, result in zip(pages, results, strict=True)]

    def _layout_image(self, page: PageTask) -> object:
        if self.two_steps.layout_size is None:
            return image_of(page)
        height, width = self.two_steps.layout_size(*_size_of(page))
        return Media(image_of(page), resized_height=height, resized_width=width)

    def _with_layout(self, page: PageTask, result: Page, policy: MediaPolicy, stop: StopSignal) -> _PageRegions:
        if result.error is not None:
            return _PageRegions(page, record=page.record(error=error_of(result), doubt=result.doubt))
        marked = result.output.outputs[0].marked
        regions = layout_regions(marked.elements() if marked is not None else (), self.two_steps)
        doubt = FINISH_DOUBTS.get(result.finish_reason or "")
        doubt = None if doubt is None else f"its layout is incomplete: {doubt}"
        return _PageRegions(page, regions or [_whole(page)], doubt=doubt, lines=self._draft_lines(page, policy, stop))

    def _by_lines(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[_PageRegions]:
        """Return pages with the regions that the reader of printed lines finds."""
        return [self._with_lines(page, policy, stop) for page in pages]

    def _with_lines(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> _PageRegions:
        assert self.lines_reader is not None
        try:
            (printed,) = self.lines_reader.read([page], policy, stop)
        except ReadingStopped:
            raise
        except Exception as error:
            return _PageRegions(page, record=page.record(error=info_of(error)))
        lines = tuple(_lines_of(printed))
        return _PageRegions(page, list(printed_regions(printed.blocks, page.scale)) or [_whole(page)], lines=lambda: lines)

    def _draft_lines(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> Callable[[], Sequence[tuple[str, Box]]]:
        """Return a function that returns the lines of a page's text layer, or its printed lines, read at the first call."""
        reader = self.lines_reader
        if page.facts.num_chars and not why_broken(page.facts):
            lines = tuple((line.text, line.box) for line in page.facts.lines)
            return lambda: lines
        if reader is None or self.engine.config.torch_device.type != "cpu":
            return tuple
        return _LazyLines(lambda: tuple(line for record in reader.read([page], policy, stop) for line in _lines_of(record)))

    def _region_tasks(self, found: _PageRegions, policy: MediaPolicy, stop: StopSignal) -> list[Task[Page]]:
        """Return the tasks that read the regions of a page. Keep only regions in `found` that are pictures or have a task."""
        from ..ocr import ocr_tasks

        if found.record is not None:
            return []
        page, regions = found.page, list[Element]()
        tasks: list[Task[Page]] = []
        try:
            pixels = stop.run(lambda: run_isolated(page_pixels, page.data, page.number, policy)).numpy()
        except ReadingStopped:
            raise
        except Exception as error:
            found.record = page.record(error=info_of(error))
            return []
        for region in found.regions:
            kind = kind_of(region)
            picture: Image.Image | None = None if kind == "picture" else region_picture(pixels, region)
            if kind == "picture" or picture is not None:
                regions.append(region)
            if picture is not None:
                prompt = self.two_steps.prompts.get(kind, self.two_steps.prompts["paragraph"])
                is_text = kind not in ("table", "formula")
                draft = _RegionDraft(region, found.lines, page.scale) if is_text else str
                tasks += ocr_tasks(self.engine, [picture], self._options_for(prompt, kind), [draft])
        found.regions = regions
        return tasks

    def _options_for(self, prompt: str, kind: str) -> OcrOptions:
        """Return the options of requests with a prompt. `kind`: "layout", or the kind of block that a region becomes."""
        penalties = self.two_steps.penalties
        values = {} if kind == "layout" else penalties.get(kind, penalties.get("paragraph", {}))
        params: SamplingParams = replace(self.options.params, **values)
        return replace(self.options, question=prompt, sampling_params=params)

    def _record(self, found: _PageRegions, results: Sequence[Page]) -> PageRecord:
        """Return the record of a page from the answers about its regions that are no pictures."""
        page = found.page
        if found.record is not None:
            return found.record
        if (failed := next((result for result in results if result.error is not None), None)) is not None:
            return page.record(error=error_of(failed), doubt=failed.doubt)
        answers = iter(results)
        texts = [(region, "" if kind_of(region) == "picture" else _answer(next(answers))) for region in found.regions]
        try:
            blocks = tuple(
                block
                for region, text in texts
                if text or kind_of(region) == "picture"
                for block in region_blocks(replace(region, text=text), page.scale, self.name)
            )
        except Exception as error:
            return page.record(error=info_of(error))
        tokens = [token for result in results for token in tokens_of(result)]
        blocks, confidence = with_token_confidences(blocks, tokens, self.calibration)
        return page.record(blocks, doubt=found.doubt or _doubt_of(results), confidence=confidence)


@dataclass(frozen=True)
class _RegionDraft:
    """Returns the text of the lines in a region."""

    region: Element
    lines: Callable[[], Sequence[tuple[str, Box]]]
    scale: float

    def __call__(self) -> str:
        return text_in(self.region, self.lines(), self.scale)


class _LazyLines:
    """Lines that a function returns, which the first thread that needs them calls once."""

    def __init__(self, function: Callable[[], Sequence[tuple[str, Box]]]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._lines: Sequence[tuple[str, Box]] | None = None

    def __call__(self) -> Sequence[tuple[str, Box]]:
        with self._lock:
            if self._lines is None:
                self._lines = ()  # if the function fails, it is not called again
                self._lines = self._function()
            return self._lines


def _lines_of(record: PageRecord) -> Iterator[tuple[str, Box]]:
    return ((line.text, line.box) for block in record.blocks for line in block.lines if line.box is not None)


def _size_of(page: PageTask) -> tuple[int, int]:
    """Return height and width of a page's image in pixels."""
    return max(round(page.facts.height * page.scale), 1), max(round(page.facts.width * page.scale), 1)


def _whole(page: PageTask) -> Element:
    """Return a region that is the whole page."""
    height, width = _size_of(page)
    return Element(WHOLE_PAGE, box=(0.0, 0.0, float(width), float(height)))


def _answer(result: Page) -> str:
    """Return an answer with its special tokens, since tables consist of them; "" if the region has no text."""
    marked = result.output.outputs[0].marked
    text = result.text if marked is None else marked.text
    return "" if result.text.strip() == _NO_TEXT else text.strip()


def _doubt_of(results: Iterable[Page]) -> str | None:
    """Return why the text of a page's regions is probably wrong, None if nothing speaks against it."""
    pages, logprob, count = list(results), 0.0, 0
    for number, result in enumerate(pages, 1):
        answer = result.output.outputs[0]
        logprob, count = logprob + (answer.cumulative_logprob or 0.0), count + len(answer.token_ids)
        if doubt := FINISH_DOUBTS.get(result.finish_reason or "") or why_refusal(result.text):
            return f"region {number} of {len(pages)}: {doubt}"
    least = min((page.min_avg_logprob for page in pages), default=0.0)
    if count and logprob / count < least:
        return f"the mean log probability of its tokens is {logprob / count:.2f}, below {least:g}"
    return None
