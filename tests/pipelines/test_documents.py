"""Documents: blocks of lines, ways of pages, and the manifest's leases. `tests/cli/test_read.py` reads whole files."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from pdf_files import text_pdf
from PIL import Image, ImageDraw, ImageFont
from sensorium import LLM, AsyncLLM
from sensorium.callers.errors import BusyError, ConfigError, ErrorInfo, InputError
from sensorium.cli.ocr import SHIPPED_MODEL
from sensorium.engine.config import EngineConfig
from sensorium.engine.drafts.depth import StepCosts
from sensorium.engine.engine import Engine
from sensorium.engine.frontend import request_handle
from sensorium.engine.frontend.request import tokenize_draft
from sensorium.engine.stats import DraftStats
from sensorium.mm.media.page_facts import PageFacts, TextLine
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import inputs, manifest, owner, readers
from sensorium.pipelines.documents.api import PageDone, ReadJob, read_files_async
from sensorium.pipelines.documents.blocks import Block, Document, PageRecord
from sensorium.pipelines.documents.inputs import documents_of
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.manifest import Manifest
from sensorium.pipelines.documents.options import OutputOptions, ReadOptions, pages_within, parse_pages
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.projections import Projected, project
from sensorium.pipelines.documents.read import TRANSIENT, DocumentReader, load
from sensorium.pipelines.documents.readers import ModelReader, NoReader
from sensorium.pipelines.documents.stop import ReadingStopped, StopSignal
from sensorium.pipelines.documents.text_blocks import blocks_of, join_lines, reading_order
from sensorium.pipelines.documents.ways import choose_way, why_not_trusted
from sensorium.pipelines.ocr_prompts import PROMPTS
from waiting import assert_idle

ALL = ((1, 9),)
TEXT = PageFacts(400, 300, num_chars=1000)


def line(text: str, top: float, left: float = 50, size: float = 10, width: float | None = None) -> TextLine:
    return TextLine(text, (left, top, left + (5 * len(text) if width is None else width), top + size), size)


def kinds(*lines: TextLine) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in blocks_of(lines, [()] * len(lines))]


def test_blocks_of_lines() -> None:
    lines = (
        line("A title", 20, size=18),
        line("The first paragraph has two lines of", 60, width=200),
        line("text, which is hyphen\u00ad", 72, width=195),
        line("ated and ends here.", 84, width=90),
        line("Its lines end early because the next", 96, width=200),
        line("paragraph begins", 120, width=80),
        line("• an item", 144, left=60),
        line("2. another one, which is", 156, left=60, width=190),
        line("longer", 168, left=70),
    )
    assert kinds(*lines) == [
        ("heading", "A title"),
        ("paragraph", "The first paragraph has two lines of text, which is hyphenated and ends here."),
        ("paragraph", "Its lines end early because the next"),
        ("paragraph", "paragraph begins"),
        ("list_item", "• an item"),
        ("list_item", "2. another one, which is longer"),
    ]
    assert blocks_of(lines, [()] * len(lines))[1].box == (50, 60, 250, 94)
    assert kinds() == []


class CountedBox(tuple[float, ...]):
    """A box that counts how often its sides are looked at."""

    looks = 0

    def __getitem__(self, side: Any) -> Any:
        type(self).looks += 1
        return super().__getitem__(side)


@pytest.mark.parametrize("num_columns", [1, 2])
@pytest.mark.parametrize("function", [reading_order, lambda lines: blocks_of(lines, [()] * len(lines))])
def test_the_work_grows_with_the_lines(function: Callable[[list[TextLine]], object], num_columns: int) -> None:
    def looks(number: int) -> int:
        places = [(12.0 * row, 150.0 * column) for row in range(number) for column in range(num_columns)]
        boxes = [CountedBox((0, -20, 300, -10)), *(CountedBox((left, top, left + 100, top + 10)) for top, left in places)]
        CountedBox.looks = 0
        function([TextLine("some words of a line", box, 10) for box in boxes])  # type: ignore[arg-type]
        return CountedBox.looks

    assert 0 < looks(800) < 3 * looks(400)


def test_columns_in_columns() -> None:
    """Each cut leaves lines of a smaller median height, so that one more column is cut off, and no stack is exhausted."""
    number, left, lines = 1500, 0.0, list[TextLine]()
    for column in range(number):
        height = 1 + 0.2 * number
        lines += [TextLine("a", (left, height * row, left + 1, height * (row + 1)), height) for row in range(2)]
        left += 1 + 0.9 * (1 + 0.1 * (2 * number - column - 0.5)) + 0.04
    lines += [TextLine("a", (left, row, left + 1, row + 1 + 0.1 * row), 1) for row in range(2 * number)]
    assert sorted(reading_order(lines)) == list(range(4 * number))


def test_an_indented_line_begins_a_paragraph() -> None:
    sides = [(65, 185), (50, 200), (50, 200), (65, 185), (50, 200)]  # left end and width
    lines = [line("word " * 8, 20 + 12 * i, left=left, width=width) for i, (left, width) in enumerate(sides)]
    assert [len(block.lines) for block in blocks_of(lines, [()] * 5)] == [3, 2]


def test_hocr_and_alto_hold_boxes_of_words() -> None:
    lines = [TextLine("two <words>", (10, 20, 120, 30), 10), TextLine("more", (10, 32, 50, 42), 10)]
    shown = blocks_of(lines, [(0.99,) * 3 + (0.7,) * 7, (1.0,) * 4], "reader", "name")
    two, angled = shown[0].lines[0].word_confidences
    blocks = (*shown, Block("page", "of a\x00\n\nmodel", source="model"))
    failed = PageRecord(2, 100, 50, error=ErrorInfo("unsupported", "nothing -- at all"))
    document = Projected("a&b.pdf", None, [PageRecord(1, 200, 100, 2.0, "reading", "", blocks), failed])
    page = ElementTree.fromstring("".join(project(document, "hocr"))).find(".//{*}div")
    assert page is not None
    assert page.get("title") == "bbox 0 0 400 200; ppageno 0"
    words = [(word.text, word.get("title")) for word in page.iterfind(".//{*}span[@class='ocrx_word']")]
    assert words[:3] == [
        ("two", f"bbox 20 40 80 60; x_wconf {round(100 * two)}"),
        ("<words>", f"bbox 100 40 240 60; x_wconf {round(100 * angled)}"),
        ("more", "bbox 20 64 100 84; x_wconf 100"),
    ]
    assert [word for word, _ in words[3:]] == ["of", "a\ufffd", "model"]
    assert words[5][1] == "bbox 0 100 400 200"
    alto = ElementTree.fromstring("".join(project(document, "alto")))
    assert [page.get("WIDTH") for page in alto.iterfind(".//{*}Page")] == ["400", "100"]
    string = alto.find(".//{*}String")
    assert string is not None
    assert string.attrib == {"CONTENT": "two", "HPOS": "20", "VPOS": "40", "WIDTH": "60", "HEIGHT": "20", "WC": f"{two:.2f}"}
    assert len(list(alto.iterfind(".//{*}TextLine"))) == 4
    assert "".join(project(document, "alto")).count("<!-- not read: nothing - - at all -->") == 1


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["an in\u00ad", "visible one"], "an invisible one"),
        (["the ISO\u00ad", "Standard"], "the ISO-Standard"),
        (["well-", "known"], "well-known"),
        (["5 -", "3"], "5 - 3"),
        (["one", "two"], "one two"),
    ],
)
def test_words_across_lines(lines: list[str], text: str) -> None:
    assert join_lines(lines) == text


def test_reading_order_of_columns() -> None:
    lines = [
        line("right 1", 50, left=300),
        line("left 1", 51, left=50),
        line("a title over both of the columns, which is wide enough for this", 20, left=50),
        line("left 2", 63, left=50),
        line("right 2", 62, left=300),
        line("below, a footer that is as wide as the title above the columns", 100, left=50),
    ]
    assert [lines[i].text.split(",")[0] for i in reading_order(lines)] == [
        "a title over both of the columns", "left 1", "left 2", "right 1", "right 2", "below",
    ]  # fmt: skip
    assert reading_order([]) == []


@pytest.mark.parametrize(
    ("facts", "reader", "text_layer", "way"),
    [
        (TEXT, "model", "auto", "text_layer"),
        (TEXT, "model", "never", "draft"),
        (TEXT, "lines", "never", "reading"),
        (PageFacts(400, 300, marks=0), "model", "auto", "blank"),
        (PageFacts(400, 300, marks=3), "model", "auto", "reading"),
        (PageFacts(400, 300, marks=3), "none", "auto", "unread"),
        (PageFacts(400, 300, num_chars=1000, num_private=6), "model", "auto", "draft"),
        (PageFacts(400, 300, num_chars=1000, num_private=5), "model", "auto", "text_layer"),
        (PageFacts(400, 300, num_chars=1000, num_unprintable=11), "lines", "auto", "reading"),
        (PageFacts(400, 300, num_chars=1000, num_outside=101), "none", "auto", "unread"),
        (PageFacts(400, 300, num_chars=1000, num_outside=101), "none", "always", "text_layer"),
        (PageFacts(400, 300, num_chars=20, picture_share=0.9, marks=0), "model", "auto", "draft"),
        (PageFacts(400, 300, num_chars=20, picture_share=0.2, marks=5), "model", "auto", "text_layer"),
        (PageFacts(400, 300, num_chars=20, marks=300), "model", "auto", "draft"),
        (PageFacts(400, 300, num_chars=1000, invisible=True, picture_share=1.0), "lines", "auto", "reading"),
        (PageFacts(400, 300, num_chars=1000, invisible=True, picture_share=1.0), "none", "auto", "text_layer"),
        (PageFacts(400, 300, num_chars=1000, invisible=True, num_private=9), "none", "auto", "unread"),
    ],
)
def test_the_cheapest_way_that_is_enough(facts: PageFacts, reader: str, text_layer: str, way: str) -> None:
    chosen, reason = choose_way(facts, reader, text_layer)  # type: ignore[arg-type]
    assert chosen == way
    assert reason
    assert (why_not_trusted(facts) == "") == (choose_way(facts, "none", "auto")[1].endswith("can be trusted"))


def test_pages_that_are_asked_for() -> None:
    assert parse_pages("3-7,12") == ((3, 7), (12, 12))
    assert parse_pages(" 5 , 1-2,2-3, 4") == ((1, 5),)
    assert pages_within(parse_pages("10-"), 12) == ((10, 12),)
    assert pages_within(parse_pages(None), 4) == ((1, 4),)
    assert pages_within(parse_pages("5"), 4) == ()


def test_pages_are_leased_once(tmp_path: Path) -> None:
    with Manifest(tmp_path / "m") as first, Manifest(tmp_path / "m") as second:
        first.add("a", ALL)
        second.add("a", ALL)
        assert first.claim("a", ALL, 4) == [1, 2, 3, 4]
        assert second.claim("a", ((3, 9),), 4) == [5, 6, 7, 8]
        assert first.claim("a", ALL, 4) == [9]
        assert not second.can_claim("a", ALL)
        assert second.claim("a", ALL, 4) == []
        first.finish("a", [PageRecord(1, reason="first")])
        second.finish("a", [PageRecord(1, reason="second"), PageRecord(2, reason="second")])  # not leased by it
        assert (first.missing("a", ALL), first.missing("a", ((1, 1),)), first.missing("b", ALL)) == (8, 0, 0)
        assert [page.reason for page in first.records("a", ((1, 1),))] == ["first"]
    with Manifest(tmp_path / "m") as third:  # leases were given back; pages that were begun are taken alone
        assert [third.claim("a", ALL, 4) for _ in range(2)] == [[2], [3]]


def test_leases_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Manifest(tmp_path / "m") as first, Manifest(tmp_path / "m") as second:
        first.add("a", ((1, 2),))
        first.owner = "another-machine:1:1:x"
        assert first.claim("a", ALL, 1) == [1]
        assert second.claim("a", ALL, 4) == [2]
        assert second.claim("a", ALL, 4) == []
        now = time.time()
        monkeypatch.setattr(manifest.time, "time", lambda: now + manifest.LEASE_SECONDS + 1)
        assert second.claim("a", ALL, 4) == [1]


def test_the_lease_of_a_process_that_has_ended(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from sensorium.pipelines.documents.manifest import Manifest
base = Manifest(Path({str(tmp_path / "m")!r}))
base.add("a", ((1, 2),))
assert base.claim("a", ((1, 2),), 2) == [1, 2]
print(base.owner, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert owner.has_ended(done.stdout.strip())
    assert not owner.has_ended(owner.new_owner())
    with Manifest(tmp_path / "m") as base:
        assert base.can_claim("a", ALL)
        assert base.claim("a", ALL, 2) == [1]


def test_a_manifest_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"no database, but longer than the header of one" * 10)
    with pytest.raises(ConfigError, match="cannot be used"):
        Manifest(tmp_path / "m")


def test_many_ranges_of_pages() -> None:
    ranges = tuple((number, number) for number in range(1, 4001, 2))
    with Manifest(None) as base:
        base.add("a", ((1, 4000),))
        assert base.can_claim("a", ranges)
        assert base.claim("a", ranges, 3) == [1, 3, 5]
        base.finish("a", [PageRecord(1, error=ErrorInfo("busy", "busy")), PageRecord(3)])
        assert base.missing("a", ranges) == 1998
        base.forget("a", ranges[1:], ["busy"])
        assert base.missing("a", ranges) == 1998
        base.forget("a", ranges, ["busy"])
        assert base.missing("a", ranges) == 1999
        assert not base.can_claim("a", ((5, 5), (4001, 4001)))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    base = Manifest(tmp_path / "m")
    (pages,) = base._base.execute("PRAGMA page_count").fetchone()
    base._base.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(ConfigError) as caught:
        base.add("a" * 1000, ((1, 1000),))
    assert caught.value.info.code == "disk_full"
    assert not base._base.in_transaction
    base.close()


def test_beats_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(manifest, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(manifest, "LEASE_SECONDS", 0.1)
    with Manifest(tmp_path / "m") as base:
        base.add("a", ALL)
        other = manifest._connect(tmp_path / "m")
        other.execute("BEGIN IMMEDIATE")
        base._base.execute("PRAGMA busy_timeout=0")
        end = time.monotonic() + 30
        while not base._lost and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="leases of pages"):
            base.claim("a", ALL, 1)
        assert "is tried again" in caplog.text
        other.execute("COMMIT")
        other.close()
        base._base.execute("PRAGMA busy_timeout=10000")
        while base._lost and time.monotonic() < end:
            time.sleep(0.01)
        assert base.claim("a", ALL, 1) == [1]


def test_a_page_that_ends_its_process_is_given_up(tmp_path: Path) -> None:
    numbers = list[list[int]]()
    for run in range(manifest.MAX_DEATHS):
        base = Manifest(tmp_path / "m")
        base.add("a", ((1, 1),))
        base.owner = f"{owner._machine()}:1:no start:{run}"
        numbers.append(base.claim("a", ((1, 1),), 4))
        base._end.set()  # not closed: the process has ended
    assert numbers == [[1]] * manifest.MAX_DEATHS
    with Manifest(tmp_path / "m") as base:
        assert base.claim("a", ((1, 1),), 4) == []
        (page,) = base.records("a", ((1, 1),))
    assert page.error is not None
    assert (page.error.code, page.error.code in TRANSIENT) == ("invalid_media", False)
    assert f"ended {manifest.MAX_DEATHS} times" in page.error.message


def test_runs_that_end_well_do_not_count(tmp_path: Path) -> None:
    for _ in range(manifest.MAX_DEATHS + 1):
        with Manifest(tmp_path / "m") as base:
            base.add("a", ((1, 1),))
            assert base.claim("a", ((1, 1),), 4) == [1]


def test_the_last_attempt_is_made_alone() -> None:
    with Manifest(None) as base:
        base.add("a", ((1, 2),))
        base._base.execute("UPDATE pages SET deaths=2, attempts=2 WHERE number=1")
        assert base.claim("a", ((2, 2),), 1) == [2]
        assert base.claim("a", ((1, 2),), 1) == []
        base.finish("a", [PageRecord(2)])
        assert base.claim("a", ((1, 2),), 1) == [1]


def test_a_finished_document_stays_finished_while_it_is_written(tmp_path: Path) -> None:
    documents = documents_of([text_pdf([["a"], ["b"]])])
    with Manifest(tmp_path / "m") as base, Manifest(tmp_path / "m") as other:
        run = DocumentReader(documents, NoReader(), ReadOptions(text_layer="never"), MediaPolicy(), base).documents()
        _, document = next(run)
        other.forget(document.key, document.ranges, ["unsupported"])
        assert other.missing(document.key, document.ranges) == 2
        assert [page.number for page in base.records(document.key, document.ranges)] == [1, 2]
        assert list(run) == []


def test_a_text_layer_that_is_cut_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "run_isolated", lambda *args, **options: [PageFacts(9, 9, num_chars=1000, num_cut=4321)])
    with Manifest(None) as base:
        reader = DocumentReader(documents_of([text_pdf([["a"]])]), NoReader(), ReadOptions(), MediaPolicy(), base)
        ((_, document),) = reader.documents()
        (page,) = base.records(document.key, document.ranges)
    assert page.doubt == "the last 4,321 characters of its text layer are left out, the limit is 131,072"


@pytest.mark.parametrize("output_format", ["md", "json", "txt", "html", "hocr", "alto"])
def test_names_that_are_not_utf8(output_format: str) -> None:
    error = ErrorInfo("invalid_input", "b\udcff.pdf is broken")
    text = "".join(project(Projected("b\udcff.pdf", error, []), output_format))
    assert b"b\\udcff.pdf is broken" in text.encode().replace(b"\\\\", b"\\")
    if output_format == "json":
        assert json.loads(text)["source"] == "b\\udcff.pdf"


@pytest.mark.parametrize("output_format", ["md", "hocr", "alto"])
def test_comments_end_where_they_should(output_format: str) -> None:
    text = "".join(project(Projected("a", ErrorInfo("invalid_input", "a---b--->c"), []), output_format))
    assert "<!-- not read: a- - -b- - ->c -->" in text
    if output_format != "md":
        ElementTree.fromstring(text)


def test_the_digest_of_a_model_tells_what_changes_its_answers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "adapter").mkdir()
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(bytes(1 << 18))
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")

    def digest(template: str | None = "template", max_tokens: int = 8, **options: object) -> str:
        config = EngineConfig(str(tmp_path / "model"), **options)  # type: ignore[arg-type]
        loop = SimpleNamespace(check_ready=lambda handles: None)
        parts = {"tokenizer": SimpleNamespace(chat_template=template), "loop": loop, "chat_options": lambda: ({}, {})}
        engine = SimpleNamespace(config=config, ocr_prompts=(), **parts)
        engine.checkpoint_digests = Engine.checkpoint_digests.func(engine)  # type: ignore[arg-type]
        return ModelReader(engine, ReadOptions(question="Read.", max_tokens=max_tokens)).digest  # type: ignore[arg-type]

    adapter = str(tmp_path / "adapter")
    digests = [digest(), digest("another"), digest(None), digest(max_tokens=9), digest(adapter=adapter)]
    digests += [digest(mm_processor_kwargs={"max_pixels": pixels}) for pixels in (1000, 2000)]
    digests += [digest(override_generation_config={"repetition_penalty": 1.1}), digest(hf_overrides={"a": {"b": 1}})]
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 8}')
    digests.append(digest(adapter=adapter))
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]
    with weights.open("r+b") as file:  # in the middle
        file.seek(1 << 17)
        file.write(b"changed")
    os.utime(weights, ns=(1, 1))
    assert digest() not in digests


def test_memory_does_not_grow_with_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "A line of a page that has some text. " * 2
    peaks = []
    for number in (32, 256):
        data = text_pdf([[words] * 4] * number)
        (tmp_path / "a.pdf").write_bytes(data)
        with Manifest(tmp_path / str(number)) as base:
            reader = DocumentReader(
                documents_of([tmp_path / "a.pdf"]), NoReader(), ReadOptions(jobs=1), MediaPolicy(max_pdf_pages=600), base
            )
            tracemalloc.start()
            (finished,) = reader.documents()
            peaks.append(tracemalloc.get_traced_memory()[1] - 3 * len(data))
            tracemalloc.stop()
            assert finished[1].ranges == ((1, number),)
            assert base.missing(finished[1].key, finished[1].ranges) == 0
    assert peaks[1] - peaks[0] < 1 << 18


def test_a_page_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are inspected together are inspected alone if one fails; what another run may not meet is read again by it."""
    calls, error = list[list[int]](), InputError("the page is odd")

    def inspect(function: object, data: bytes, numbers: list[int], policy: MediaPolicy, tenant: None) -> list[PageFacts]:
        calls.append(numbers)
        if 2 in numbers:
            raise error
        return [PageFacts(9, 9, marks=0) for _ in numbers]

    monkeypatch.setattr(inputs, "run_isolated", inspect)
    monkeypatch.setattr(inputs, "_PAUSE", 0)
    documents = documents_of([text_pdf([["a"]] * 3)])

    def read() -> list[PageRecord]:
        with Manifest(tmp_path / "m") as base:
            ((_, document),) = DocumentReader(documents, NoReader(), ReadOptions(), MediaPolicy(), base).documents()
            return list(base.records(document.key, document.ranges))

    assert [page.error and page.error.message for page in read()] == [None, "the page is odd", None]
    assert calls == [[1, 2, 3], [1], [2], [3]]
    assert read()[1].error is not None
    assert len(calls) == 4  # it is not tried again
    (tmp_path / "m").unlink()
    error = BusyError("the machine is busy")  # type: ignore[assignment]
    assert read()[1].error.code == "busy"  # type: ignore[union-attr]
    error = None  # type: ignore[assignment]
    monkeypatch.setattr(inputs, "run_isolated", lambda *args, **options: [PageFacts(9, 9, marks=0) for _ in args[2]])
    assert [page.error for page in read()] == [None] * 3


def test_llm_read(tmp_path: Path) -> None:
    image = SHIPPED_MODEL.parent / "media" / "line1.png"
    answer = json.loads((image.parent / "answers.json").read_text("utf-8"))["line1.png"]["answer"]
    with LLM(SHIPPED_MODEL) as llm:
        files = [text_pdf([["a page of text"], []]), image, tmp_path / "missing.pdf", b"no\0picture"]
        documents = llm.read(files, use_tqdm=False)
        assert [document.text for document in documents] == ["a page of text", answer, "", ""]
        assert [page.way for page in documents[0].pages] == ["text_layer", "blank"]
        assert documents[2].error is not None
        assert documents[3].error is not None
        assert (documents[3].error.code, documents[3].pages) == ("invalid_media", ())
        assert [documents[1].source, documents[1].failed] == [str(image), []]
        (page,) = documents[1].pages
        assert page.confidence is not None
        assert page.confidence == page.blocks[0].confidence > 0.5
        assert documents[0].pages[0].confidence is None
        written = llm.read(image, output_dir=tmp_path / "out", output_format="txt", use_tqdm=False)
        assert written == documents[1:2]
        assert (tmp_path / "out" / "line1.txt").read_text("utf-8") == f"{answer}\n"
        with pytest.raises(ConfigError, match="records of an earlier run"):
            llm.read(image, output_dir=tmp_path / "out")
        with pytest.raises(InputError, match="hocr, alto") as caught:
            llm.read(image, output_format="docx")
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "output_format")
        with pytest.raises(InputError, match="text_layer"):
            llm.read(image, text_layer="sometimes")  # type: ignore[arg-type]
        with pytest.raises(InputError) as caught:
            llm.read(image, question=next(iter(PROMPTS)))
        assert caught.value.info.param == "question"


def test_an_engine_that_cannot_read_is_refused_before_any_page(tmp_path: Path) -> None:
    (image,) = (SHIPPED_MODEL.parent / "media").glob("receipt1.png")
    with LLM(SHIPPED_MODEL) as llm, LLM(SHIPPED_MODEL.parent / "tiny-asr") as speech:
        llm.sleep()
        for engine, code in (llm, "engine_asleep"), (speech, "unsupported"):
            with pytest.raises(InputError) as caught:
                engine.read(image, output_dir=tmp_path / "out", use_tqdm=False)
            assert caught.value.info.code == code
        llm.wake_up()
        (document,) = llm.read(image, output_dir=tmp_path / "out", resume=True, use_tqdm=False)
        assert not document.failed
    with pytest.raises(InputError) as caught:
        llm.read(image, use_tqdm=False)
    assert caught.value.info.code == "engine_closed"


def test_an_answer_that_cannot_be_read_is_an_error_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def answer_blocks(text: str, *args: object) -> tuple[Block, ...]:
        calls.append(text)
        if len(calls) == 2:
            raise RecursionError
        return (Block("paragraph", text),)

    monkeypatch.setattr(readers, "answer_blocks", answer_blocks)
    with LLM(SHIPPED_MODEL) as llm:
        (document,) = llm.read(scans(3), use_tqdm=False)
    assert [page.error and page.error.code for page in document.pages] == [None, "internal", None]
    assert [len(page.blocks) for page in document.pages] == [1, 0, 1]


def test_the_reader_of_printed_lines(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    image, font = Image.new("RGB", (900, 300), "white"), ImageFont.load_default(32)
    for row, text in enumerate(("Invoice No. 4711", "due 2024-05-31, net 14 days", "TOTAL 1,327.45")):
        ImageDraw.Draw(image).text((40, 30 + 80 * row), text, font=font, fill="black")
    image.save(tmp_path / "invoice.png")
    with Manifest(None) as base:
        items = documents_of([tmp_path / "invoice.png"])
        ((_, document),) = DocumentReader(items, LinesReader(), ReadOptions(), MediaPolicy(), base).documents()
        (page,) = base.records(document.key, document.ranges)
    lines = [line for block in page.blocks for line in block.lines]
    assert [line.text for line in lines] == ["Invoice No. 4711", "due 2024-05-31, net 14 days", "TOTAL 1,327.45"]
    for row, line in enumerate(lines):
        assert line.box is not None
        assert line.box[1] - 12 < 30 + 80 * row < line.box[3]
        assert line.confidence is not None
        assert line.confidence > 0.8


LINE = SHIPPED_MODEL.parent / "media" / "line1.png"


def scans(number: int) -> bytes:
    """Return a TIFF of pages that only a model can read."""
    page, file = Image.open(LINE).convert("RGB"), BytesIO()
    page.save(file, "tiff", save_all=True, append_images=[page] * (number - 1))
    return file.getvalue()


class Finder:
    """Stands for the reader of printed lines, which reads this text on each page."""

    recognizer = None

    digest = "finder 1"

    def __init__(self, text: str) -> None:
        self.result, self.pages = text, list[int]()

    def text(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> str:
        self.pages.append(page.number)
        return self.result

    def room(self, page: PageTask, policy: MediaPolicy, stop: StopSignal) -> float:
        return 1000.0


def read_with(
    finder: Finder | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[Document], list[str], list[DraftStats]]:
    """Return what a model reads beside a reader of printed lines, the drafts of its requests, and what they achieved."""
    texts = list[str]()

    def tokenize(given: Any, tokenizer: Any) -> tuple[int, ...]:
        tokens = tokenize_draft(given, tokenizer)
        texts.append(tokenizer.decode(list(tokens)))
        return tokens

    monkeypatch.setattr(readers, "find_lines_reader", lambda name: finder)
    monkeypatch.setattr(request_handle, "tokenize_draft", tokenize)
    with LLM(SHIPPED_MODEL, dtype="float32", batch_invariant=True, **options) as llm:
        drafter = llm.engine.loop.core.scheduler.drafts.drafter
        if drafter is not None:  # on a busy machine, measured costs may allow no drafts
            drafter.costs, drafter._now = StepCosts((1.0,) * 16), lambda: 0.0
        documents = llm.read([scans(3), text_pdf([["a page of text"]])], text_layer="never", use_tqdm=False)
        return documents, sorted(texts), [stats for stats in llm.stats.drafts if stats.proposer == "text"]


def test_printed_lines_are_drafts_of_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those without. The draft of a page with a text layer is that layer."""
    answer = json.loads((LINE.parent / "answers.json").read_text("utf-8"))[LINE.name]["answer"]
    plain, texts, _ = read_with(None, monkeypatch)
    assert [page.way for document in plain for page in document.pages] == ["reading"] * 3 + ["draft"]
    assert texts == ["", "", "", "a page of text"]
    finder = Finder(answer)
    documents, texts, (stats,) = read_with(finder, monkeypatch)
    assert (documents, texts) == (plain, sorted([answer] * 3 + ["a page of text"]))
    assert sorted(finder.pages) == [1, 2, 3]
    assert stats.num_accepted > 0
    documents, texts, _ = read_with(Finder("another text"), monkeypatch)
    assert (documents, texts) == (plain, ["a page of text", *["another text"] * 3])
    unused = Finder(answer)
    assert read_with(unused, monkeypatch, speculative_config={"num_speculative_tokens": 0})[0] == plain
    assert unused.pages == []


def test_reading_as_a_coroutine(tmp_path: Path) -> None:
    asyncio.run(read_as_a_coroutine(tmp_path))


async def read_as_a_coroutine(tmp_path: Path) -> None:
    files, pages = [text_pdf([["a page"], ["another"]]), scans(2)], list[PageDone]()
    async with AsyncLLM(str(SHIPPED_MODEL)) as llm:
        documents = await llm.read(files, on_page=pages.append)
        assert documents == llm.llm.read(files, use_tqdm=False)
        with pytest.raises(InputError):
            await llm.read(files, output_format="doc")
        written = await llm.read(files[0], tmp_path / "out", "txt", max_pages=2)
    assert [[page.way for page in document.pages] for document in documents] == [["text_layer"] * 2, ["reading"] * 2]
    assert {(page.page, page.num_pages, page.way) for page in pages} == {
        (1, 2, "text_layer"), (2, 2, "text_layer"), (1, 2, "reading"), (2, 2, "reading"),
    }  # fmt: skip
    assert written == documents[:1]
    assert [file.read_text() for file in (tmp_path / "out").glob("*.txt")] == ["a page\n\fanother\n"]


def test_cancelling_stops_at_the_page_in_work(tmp_path: Path) -> None:
    """The requests end, no page has a record of it, and the next call reads the rest."""
    asyncio.run(cancel_reading(tmp_path))


async def cancel_reading(tmp_path: Path) -> None:
    began, pages = asyncio.Event(), list[PageDone]()
    async with AsyncLLM(str(SHIPPED_MODEL)) as llm:
        loop, run = asyncio.get_running_loop(), llm.engine.request

        def request(*args: object, **options: object) -> object:
            loop.call_soon_threadsafe(began.set)
            return run(*args, **options)  # type: ignore[arg-type]

        llm.engine.request = request  # type: ignore[method-assign, assignment]
        work = asyncio.ensure_future(llm.read(scans(40), tmp_path / "out", on_page=pages.append))
        await began.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert_idle(llm)
        with Manifest(tmp_path / "out" / manifest.NAME) as base:
            (row,) = base._base.execute("SELECT COUNT(*) FROM pages WHERE owner IS NOT NULL OR deaths > 0")
            (errors,) = base._base.execute("SELECT COUNT(*) FROM pages WHERE json_extract(CAST(record AS TEXT), '$.error')")
        assert (row, errors) == ((0,), (0,))
        (document,) = await llm.read(scans(40), tmp_path / "out", resume=True)
    assert len(document.pages) == 40
    assert not document.failed


def test_cancelling_a_reading_that_waits_for_a_thread() -> None:
    asyncio.run(cancel_waiting())


async def cancel_waiting() -> None:
    free, nothing = threading.Event(), SimpleNamespace(engine=None)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(free.wait)
        try:
            reading = read_files_async(nothing, threads, ReadJob(b"", ReadOptions(), OutputOptions()), None)  # type: ignore[arg-type]
            work = asyncio.ensure_future(reading)
            await asyncio.sleep(0)
            work.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert work.cancelled()
        finally:
            free.set()


def test_a_signal_counts_as_no_death(tmp_path: Path) -> None:
    base = Manifest(tmp_path / "m")
    base.add("a", ALL)
    assert base.claim("a", ALL, 2) == [1, 2]
    base.owner = f"{owner._machine()}:1:no start:x"
    base._base.execute("UPDATE pages SET owner=? WHERE owner IS NOT NULL", (base.owner,))
    base.give_back()
    base._end.set()  # not closed: the process has ended
    with Manifest(tmp_path / "m") as other:
        assert other.claim("a", ALL, 1) == [3]
        assert other.claim("a", ((1, 1),), 1) == [1]
        assert other._base.execute("SELECT SUM(deaths) FROM pages").fetchone() == (0,)
    with Manifest(None) as memory:
        memory.give_back()


def test_nothing_is_leased_after_a_signal(tmp_path: Path) -> None:
    """Neither by another thread, nor by a transaction that the signal has interrupted."""
    base = Manifest(tmp_path / "m")
    base.add("a", ALL)
    assert base.claim("a", ALL, 2) == [1, 2]
    base._lock.acquire()
    base._base.execute("BEGIN IMMEDIATE")
    base._base.execute("UPDATE pages SET owner=?", (base.owner,))
    base.give_back()
    base._lock.release()
    with pytest.raises(ReadingStopped):
        base.claim("a", ALL, 2)
    base._end.set()  # not closed: the process has ended
    with closing(sqlite3.connect(tmp_path / "m")) as stored:
        assert stored.execute("SELECT COUNT(*) FROM pages WHERE owner IS NOT NULL").fetchone() == (0,)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OutputOptions, {"output_format": [[]]}),
        (OutputOptions, {"output_dir": 3}),
        (OutputOptions, {"resume": b"x"}),
        (ReadOptions, {"text_layer": [[]]}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_options_of_other_types_are_refused(kind: type, options: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        kind(**options)
    assert caught.value.info.param == next(iter(options))


def test_a_text_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "long.txt", list[tuple[str, int]]()
    path.write_text("\f".join(f"page {number}" for number in range(100)))

    def run_isolated(function: Callable[..., object], data: bytes, *args: object, tenant: str | None = None) -> object:
        calls.append((function.__name__, len(data)))
        return function(data, *args)

    monkeypatch.setattr(inputs, "run_isolated", run_isolated)
    with Manifest(None) as records:
        reading = DocumentReader(documents_of([str(path)]), NoReader(), ReadOptions(jobs=1), MediaPolicy(), records)
        (document,) = [load(opened, records) for _, opened in reading.documents()]
    assert [page.text for page in document.pages] == [f"page {number}" for number in range(100)]
    pages, facts = ([size for name, size in calls if name == kind] for kind in ("find_text_pages", "text_facts"))
    assert (pages, sum(facts), len(facts)) == ([path.stat().st_size], path.stat().st_size - 99, 7)
