"""Readings beside what is known of their pages: numbers of the text layer, and marks."""

from __future__ import annotations

from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from sensorium import LLM
from sensorium.cli.ocr import SHIPPED_MODEL
from sensorium.mm.media.page_facts import PageFacts, TextLine, page_facts
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import readers
from sensorium.pipelines.documents.blocks import Block, NumberCheck, PageRecord
from sensorium.pipelines.documents.doubt import SPARE, compare_numbers, doubt_of, why_invented, why_refusal
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.projections import page_fields
from sensorium.pipelines.documents.readers import ModelReader
from sensorium.pipelines.documents.stop import StopSignal


def facts(text: str, **changes: int) -> PageFacts:
    lines = (TextLine(text, (0, 0, 100, 10), 10),) if text else ()
    return PageFacts(100, 100, **{"num_chars": len(text), **changes}, lines=lines)  # type: ignore[arg-type]


def read(text: str) -> tuple[Block, ...]:
    return (Block("paragraph", text, source="model"),) if text else ()


@pytest.mark.parametrize(
    ("layer", "reading", "check"),
    [
        ("1,234.50 and 7", "1.234,50 and 7", NumberCheck(2)),
        ("17 and 18", "17 and 13", NumberCheck(1, ("18",), ("13",))),
        ("5 5 5", "5 5", NumberCheck(2, ("5",))),
        ("no number", "none", NumberCheck(0)),
        ("", "17", None),
    ],
)
def test_numbers_are_compared(layer: str, reading: str, check: NumberCheck | None) -> None:
    assert compare_numbers(facts(layer), read(reading)) == check


def test_few_numbers_are_listed() -> None:
    check = compare_numbers(facts(" ".join(map(str, range(100)))), read("x"))
    assert check is not None
    assert (len(check.only_text_layer), check.agreed) == (50, 0)


@pytest.mark.parametrize(
    ("page", "reading", "is_doubted"),
    [
        (facts("1 2 3 4 5 6"), "1 2 3", False),
        (facts("1 2 3 4 5 6"), "1 2 8", True),
        (facts("1 2 3 4"), "9", False),
        (facts("1 2 3 4 5 6"), "", False),
        (facts(" ".join(map(str, range(200)))), " ".join(map(str, range(90))), True),
        (facts("1 2 3 4 5 6", num_private=3), "9", False),
        (facts("", marks=0), "a" * 51, True),
        (facts("", marks=2), "a" * 100, False),
        (facts("", marks=2), "a" * 101, True),
        (facts("", marks=2), "a " * 100, False),
        (facts(""), "a" * 900, False),
    ],
)
def test_readings_that_are_doubted(page: PageFacts, reading: str, is_doubted: bool) -> None:
    assert (doubt_of(page, read(reading)) is not None) is is_doubted


def test_records_of_readings_have_both() -> None:
    page = facts("1 2 3 4 5 6")
    record = PageTask(b"", 1, page, "draft", "", 1.0).record(read("1 2 8"))
    assert record.numbers == NumberCheck(2, ("3", "4", "5", "6"), ("8",))
    assert record.doubt is not None
    assert page_fields(record)["numbers"]["agreed"] == 2
    assert PageTask(b"", 1, page, "draft", "", 1.0).record(read("1 2 8"), doubt="cut off").doubt == "cut off"
    layer = PageTask(b"", 1, page, "text_layer", "", 1.0).record(read("1 2 8"))
    assert (layer.numbers, layer.doubt) == (None, None)
    assert "numbers" not in page_fields(PageRecord(1))


def test_readings_for_which_a_page_has_no_room_are_invented() -> None:
    assert why_invented(read("a" * SPARE), 0.0) is None
    assert why_invented(read("a" * (SPARE + 1)), 0.0) is not None
    assert why_invented(read("a" * (SPARE + 100)), 10.0) is None
    assert why_invented(read("a" * (SPARE + 101)), 10.0) is not None


class Finder:
    """Stands for the reader of printed lines, which finds lines of a total length."""

    digest = "finder 1"

    def __init__(self, line_length: float | Exception) -> None:
        self.result, self.pages = line_length, list[int]()

    def line_length(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> float:
        self.pages.append(page.number)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("line_length", "page", "text", "is_doubted"),
    [
        (0.0, facts("", marks=900), "an invented text " * 20, True),
        (90.0, facts("", marks=900), "an invented text " * 20, False),
        (RuntimeError(), facts("", marks=900), "an invented text " * 20, False),
    ],
)
def test_a_models_reading_is_compared_with_the_lines_of_its_page(
    line_length: Any, page: PageFacts, text: str, is_doubted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = Finder(line_length)
    reader = ModelReader.__new__(ModelReader)
    monkeypatch.setattr(reader, "_lines_reader", finder, raising=False)
    task = PageTask(b"", 7, page, "reading", "", 1.0)
    record = reader._checked(task, task.record(read(text)), MediaPolicy(), StopSignal())
    assert (record.doubt is not None, finder.pages) == (is_doubted, [7])
    for other in (task.record(read("short")), task.record(read(text), doubt="it repeats itself")):
        assert reader._checked(task, other, MediaPolicy(), StopSignal()) == other
    assert finder.pages == [7]  # only a long text without a doubt is looked at


def noise_pages() -> dict[str, Image.Image]:
    """Return pages without text: ruled and squared paper, noise, a table-top, and a sheet on it."""
    rng, size = np.random.default_rng(36), (620, 877)
    pages = {name: Image.new("RGB", size, "white") for name in ("ruled", "squared")}
    for y in range(40, 877, 24):
        for page in pages.values():
            ImageDraw.Draw(page).line((0, y, 620, y), fill=(120, 150, 190))
    for x in range(20, 620, 24):
        ImageDraw.Draw(pages["squared"]).line((x, 0, x, 877), fill=(120, 150, 190))
    rows, columns = np.mgrid[0:877, 0:620]
    grain = 120 + 30 * np.sin((rows + 20 * np.sin(columns / 90)) / 9) + rng.normal(0, 10, rows.shape)
    wood = np.stack([grain * 1.1, grain * 0.8, grain * 0.5], axis=-1)
    sheet = wood.copy()
    sheet[100:750, 75:550] = 225 + rng.normal(0, 6, (650, 475, 1))
    pictures = {"noise": rng.uniform(0, 255, (877, 620, 3)), "table": wood, "sheet": sheet}
    return pages | {name: Image.fromarray(picture.clip(0, 255).astype(np.uint8)) for name, picture in pictures.items()}


@pytest.mark.parametrize("name", noise_pages())
def test_nothing_is_invented_on_pages_without_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    file = BytesIO()
    noise_pages()[name].save(file, "png")
    (page,) = page_facts(file.getvalue(), [1], MediaPolicy())
    task = PageTask(file.getvalue(), 1, page, "reading", "", 1.0)
    lines = LinesReader()
    (record,) = lines.read([task], MediaPolicy(), StopSignal())
    assert not record.text or record.doubt is not None
    reader = ModelReader.__new__(ModelReader)
    monkeypatch.setattr(reader, "_lines_reader", lines, raising=False)
    written = task.record(read("The invoice of this month. " * 20))
    assert reader._checked(task, written, MediaPolicy(), StopSignal()).doubt is not None


def test_printed_pages_have_room_for_their_text() -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    image, font, file = Image.new("RGB", (900, 400), "white"), ImageFont.load_default(20), BytesIO()
    texts = [f"Line {row} of a page with narrow letters: illicit filling, little" for row in range(10)]
    for row, text in enumerate(texts):
        ImageDraw.Draw(image).text((40, 20 + 36 * row), text, font=font, fill="black")
    image.save(file, "png")
    task = PageTask(file.getvalue(), 1, PageFacts(900, 400, marks=300), "reading", "", 1.0)
    assert why_invented(read(" ".join(texts)), LinesReader().line_length(task, MediaPolicy(), StopSignal())) is None


def test_the_digest_of_a_model_names_the_lines_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set[str]()
    for finder in (None, Finder(0.0)):
        reader = ModelReader.__new__(ModelReader)
        config = SimpleNamespace(model="m", **dict.fromkeys(readers._ENGINE_OPTIONS))
        engine = SimpleNamespace(config=config, checkpoint_digests=["d"], tokenizer=SimpleNamespace(chat_template=""))
        options = SimpleNamespace(question="", max_tokens=1)
        values = {"_engine": engine, "_options": options, "_lease": None, "_lines_reader": finder, "_calibration": None}
        for key, value in values.items():
            monkeypatch.setattr(reader, key, value, raising=False)
        digests.add(reader.digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("text", "is_refusal"),
    [
        ("I'm sorry, but I can't read the text in this image.", True),
        ("There is no visible text in the image.", True),
        ("The image is blank.", True),
        ("This page appears to be completely empty.", True),
        ("No text is visible.", True),
        ("抱歉，我无法识别图片中的文字。", True),
        ("", False),
        ("The image is shown in figure 3.", False),
        ("There is no text without an author.", True),
        ("Sorry, " + "a long letter " * 30, False),
        ("Dear Sir, I am sorry to hear of it.", False),
        ("There are no textile mills here.", False),
    ],
)
def test_refusals(text: str, is_refusal: bool) -> None:
    assert (why_refusal(text) is not None) is is_refusal


@pytest.mark.parametrize(
    ("text", "finish_reason", "is_doubted"),
    [
        ("a page", "stop", False),
        ("a page", "repetition", True),
        ("a page", "length", True),
        ("I cannot read this.", "stop", True),
    ],
)
def test_answers_that_end_badly_are_doubted(text: str, finish_reason: str, is_doubted: bool) -> None:
    answer = SimpleNamespace(marked=None, token_ids=[], logprobs=None)
    result: Any = SimpleNamespace(
        error=None, text=text, doubt=None, finish_reason=finish_reason, output=SimpleNamespace(outputs=[answer])
    )
    reader = ModelReader.__new__(ModelReader)
    reader._calibration = None
    reader._engine = SimpleNamespace(config=SimpleNamespace(model="m"))  # type: ignore[assignment]
    task = PageTask(b"", 1, facts("", marks=900), "reading", "", 1.0)
    assert (reader._record(task, [(0, result)]).doubt is not None) is is_doubted


def test_loops_of_models_are_repaired() -> None:
    with LLM(SHIPPED_MODEL) as llm:
        detection = ModelReader(llm.engine, ReadOptions(question="Read.", max_tokens=8))._options.params.repetition_detection
    assert detection is not None
    assert detection.repair
