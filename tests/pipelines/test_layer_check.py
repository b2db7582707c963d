"""Text layers are compared with a reading of sampled lines: one that lies is not used, and the record says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pdf_files import text_pdf
from PIL import Image, ImageDraw, ImageFont
from sensorium.callers.errors import InputError
from sensorium.mm.media.line_pictures import LinePlace, line_pictures
from sensorium.mm.media.page_facts import PageFacts, page_facts
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import layer_check
from sensorium.pipelines.documents.blocks import PageRecord
from sensorium.pipelines.documents.costs import CostClock
from sensorium.pipelines.documents.inputs import documents_of
from sensorium.pipelines.documents.layer_check import alike, checked_facts, folded
from sensorium.pipelines.documents.line_recognizer import Picture
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.manifest import Manifest
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.read import DocumentReader
from sensorium.pipelines.documents.readers import NoReader
from sensorium.pipelines.documents.stop import StopSignal
from sensorium.pipelines.documents.ways import choose_way, why_broken

pytest.importorskip("pypdfium2")
POLICY = MediaPolicy()
LINES = [
    "# A report of the year",
    "The quick report shows that prices",
    "in most regions have risen by about",
    "four percent while sales fell. The",
    "committee will meet again in October",
    "to discuss the budget of next year.",
    "Total 4711.20 and 12 items more",
    "Signed by the members in Dresden",
    "and sent to everybody in the city",
]
OTHERS = ["Lorem ipsum dolor sit amet", "consectetur adipiscing elit", "sed do eiusmod tempor", "ut labore et dolore"] * 2


class Recognizer:
    """Stands for what reads lines. It gives these answers, one after the other, the last one again and again."""

    alphabet = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")

    def __init__(self, *readings: tuple[str, float]) -> None:
        self.readings, self.calls = list(readings), list[int]()

    def recognize(self, pictures: Sequence[Picture], stop: StopSignal) -> list[tuple[str, float]]:
        self.calls.append(len(pictures))
        return [self.readings.pop(0) if len(self.readings) > 1 else self.readings[0] for _ in pictures]


def facts_of(data: bytes) -> PageFacts:
    (facts,) = page_facts(data, [1], POLICY)
    return facts


def check(data: bytes, recognizer: Any) -> PageFacts:
    (facts,) = checked_facts(data, [(1, facts_of(data))], recognizer, POLICY, StopSignal())
    return facts


def picture_of(lines: Sequence[str]) -> tuple[int, int, bytes]:
    image, font = Image.new("L", (1200, 900), 255), ImageFont.load_default(36)
    for row, text in enumerate(lines):
        ImageDraw.Draw(image).text((90, 90 + 60 * row), text.strip("# "), font=font, fill=0)
    return *image.size, image.tobytes()


def test_more_lines_are_read_only_if_one_differs() -> None:
    data, wrong = text_pdf([LINES]), ("another text", 0.99)
    silent = Recognizer(("another text", 0.5))
    facts = check(data, silent)
    assert (facts.num_sampled, facts.num_differing, silent.calls) == (0, 0, [2, 0])  # low scores say nothing
    lying = Recognizer(wrong)
    facts = check(data, lying)
    assert (facts.num_sampled, facts.num_differing, lying.calls) == (8, 8, [2, 6])
    assert why_broken(facts)
    assert check(data, Recognizer(wrong)) == facts
    most_right = Recognizer(wrong, ("another text", 0.1))
    facts = check(data, most_right)
    assert (facts.num_sampled, facts.num_differing, most_right.calls) == (1, 1, [2, 6])


@pytest.mark.parametrize(
    ("sampled", "differing", "reader", "way"),
    [(2, 0, "lines", "text_layer"), (8, 4, "lines", "text_layer"), (8, 5, "lines", "reading"), (8, 5, "model", "draft")],
)
def test_a_layer_that_mostly_differs_is_not_used(sampled: int, differing: int, reader: Any, way: str) -> None:
    facts = PageFacts(400, 300, num_chars=1000, num_sampled=sampled, num_differing=differing)
    chosen, reason = choose_way(facts, reader, "auto")
    assert chosen == way
    assert f" of {sampled} sampled lines" in reason
    assert choose_way(facts, reader, "always")[0] == "text_layer"


@pytest.mark.parametrize(
    ("text", "reading", "is_cut", "is_alike"),
    [
        ("The ef\ufb01cient of\ufb01ce", "The efficient office", False, True),
        ("well-known stra\u00dfe Ill 10", "WELLKNOWN STRASSE lll lO", False, True),
        ("the long line of a page goes on", "the long lin", True, True),
        ("the long line of a page goes on", "the long lin", False, False),
        ("Uif!rvjdl!sfqpsu!tipxt", "The quick report shows", False, False),
        ("rebmun laires", "serial number", False, False),
    ],
)
def test_lines_that_are_alike(text: str, reading: str, is_cut: bool, is_alike: bool) -> None:
    assert (alike(folded(text), folded(reading), is_cut) >= layer_check._LEAST_ALIKE) is is_alike


@pytest.mark.parametrize(
    "lines", [["short"], ["......... ......... ........ a"], ["1 + 2 = (3 - 4) * {5} / [6]"], ["Gr\\374\\337e aus dem Norden"]]
)
def test_lines_whose_reading_says_nothing(lines: list[str]) -> None:
    """They are too short, have few letters, or letters that the recognition does not know."""
    unused = Recognizer(("another text", 0.99))
    assert check(text_pdf([lines]), unused).num_sampled == 0
    assert unused.calls == [0, 0]


def test_pictures_of_lines() -> None:
    data = text_pdf([["first line of it", "second line of it"]], page="/CropBox[10 20 390 290]")
    facts = facts_of(data)
    first, second = line_pictures(data, [LinePlace(1, line.box) for line in facts.lines], POLICY)
    assert first.shape[0] in range(40, 47)
    assert first.shape[2] == 3
    assert not np.array_equal(first.numpy(), second.numpy())
    assert all((picture < 128).any() for picture in (first, second))
    with pytest.raises(InputError):
        line_pictures(data, [LinePlace(3, facts.lines[0].box)], POLICY)


def test_pages_that_cannot_be_rendered_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_isolated(function: Any, data: bytes, places: list[LinePlace], policy: MediaPolicy, tenant: None) -> object:
        if any(place.number == 2 for place in places):
            raise InputError("broken")
        return line_pictures(data, places, policy)

    monkeypatch.setattr(layer_check, "run_isolated", run_isolated)
    data = text_pdf([LINES] * 3)
    pages = list(zip((1, 2, 3), page_facts(data, [1, 2, 3], POLICY), strict=True))
    checked = checked_facts(data, pages, Recognizer(("another text", 0.99)), POLICY, StopSignal())
    assert [facts.num_sampled for facts in checked] == [8, 0, 8]


class Reader(NoReader):
    """Reads no page, but compares text layers."""

    kind = "lines"

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer  # type: ignore[assignment]

    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]:
        return [page.record() for page in pages]


def read(data: bytes, reader: Any, **options: Any) -> tuple[list[PageRecord], CostClock]:
    with Manifest(None) as base:
        reading = DocumentReader(documents_of([data]), reader, ReadOptions(jobs=1, **options), POLICY, base)
        ((_, document),) = reading.documents()
        return list(base.records(document.key, document.ranges)), reading._clock


def test_records_say_that_lines_differ() -> None:
    recognizer = Recognizer(("another text", 0.99))
    (page, blank), clock = read(text_pdf([LINES, []]), Reader(recognizer))
    assert (page.way, page.doubt, blank.way) == ("reading", None, "blank")
    assert page.reason.startswith("8 of 8 sampled lines")
    assert clock.costs["text_layer none"].pages == 1
    for options in ({"text_layer": "always"}, {"text_layer": "never"}):
        unused = Recognizer(("another text", 0.99))
        read(text_pdf([LINES]), Reader(unused), **options)
        assert unused.calls == []
    (page,), _ = read(text_pdf([LINES]), NoReader())
    assert (page.way, page.text.count("report")) == ("text_layer", 2)


@pytest.mark.parametrize(
    ("data", "is_used"),
    [
        (text_pdf([LINES]), True),
        (text_pdf([LINES], shift=1), False),
        (text_pdf([OTHERS], picture=picture_of(LINES)), False),
        (text_pdf([LINES], picture=picture_of(LINES)), True),
        (text_pdf([OTHERS], picture=(2, 2, b"\xff" * 4)), False),
    ],
    ids=["right", "shifted", "another text behind a picture", "the text of the picture", "nothing is shown"],
)
def test_layers_that_lie(data: bytes, is_used: bool) -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    (page,), _ = read(data, LinesReader())
    assert (page.way == "text_layer") is is_used
    assert "sampled lines" in page.reason
    assert "Lorem" not in page.text
