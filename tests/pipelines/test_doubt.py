"""Readings beside what is known of their pages: numbers of the text layer, and marks."""

from __future__ import annotations

import pytest
from sensorium.mm.media.page_facts import PageFacts, TextLine
from sensorium.pipelines.documents.blocks import Block, NumberCheck, PageRecord
from sensorium.pipelines.documents.doubt import compare_numbers, doubt_of
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.projections import page_fields


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
