"""Printed lines of scans: pages made level, lines cut at gaps and rules, tables, and pages that stand on their heads."""

from __future__ import annotations

import math
from io import BytesIO
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from sensorium.mm.media.page_facts import PageFacts, verticals_of
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents.blocks import Block, Line, PageRecord, table_rows
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.page_frame import PageFrame, Quad, frame_of, inner_box
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.printed_lines import ReadLine, line_parts
from sensorium.pipelines.documents.stop import StopSignal

SIZE = (600, 400)
LEVEL = PageFrame(0.0, (0.0, 0.0), (0.0, 0.0), 1.0)


def quad(left: float, top: float, right: float, bottom: float, degrees: float = 0.0) -> Quad:
    """Return the corners of a line, turned clockwise around the middle of the page."""
    angle, x, y = math.radians(degrees), SIZE[0] / 2, SIZE[1] / 2
    corners = ((left, top), (right, top), (right, bottom), (left, bottom))

    def turned(corner: tuple[float, float]) -> tuple[float, float]:
        across, down = corner[0] - x, corner[1] - y
        cos, sin = math.cos(angle), math.sin(angle)
        return x + cos * across - sin * down, y + sin * across + cos * down

    a, b, c, d = map(turned, corners)
    return a, b, c, d


@pytest.mark.parametrize("degrees", [0, 0.01, 1.5, -4, 90, 91, 178, 180, -92])
def test_a_page_is_made_level(degrees: float) -> None:
    quads = [quad(100, 50 + 40 * i, 400 + 10 * i, 70 + 40 * i, degrees) for i in range(5)]
    quads.append(quad(20, 100, 40, 105, degrees + 30))  # a line that stands askew on the page
    frame = frame_of(quads, SIZE)
    assert math.isclose(math.cos(frame.angle - math.radians(degrees)), 1, abs_tol=1e-6)
    boxes = [frame.box_of(corners) for corners in quads[:5]]
    assert all(math.isclose(box[2] - box[0], (300 + 10 * i) / frame.unit, rel_tol=0.01) for i, box in enumerate(boxes))
    assert all(math.isclose(below[1] - above[1], 40 / frame.unit, rel_tol=0.01) for above, below in pairwise(boxes))
    block = frame.placed(Block("paragraph", "a", boxes[0], (Line("a", boxes[0]),)), 2.0)
    xs, ys = zip(*quads[0], strict=True)
    expected = (min(xs) / 2, min(ys) / 2, max(xs) / 2, max(ys) / 2)
    assert block.box == pytest.approx(expected, abs=0.3)
    assert block.lines[0].box == block.box


def test_few_lines_show_no_skew() -> None:
    assert frame_of([quad(100, 50, 400, 70, 3), quad(100, 90, 400, 110, 3)], SIZE).angle == 0.0
    assert frame_of([quad(10, 10, 10, 10)], (1, 1)).unit > 0


def read_line(text: str, starts: dict[str, float], step: float = 8, right: float | None = None) -> ReadLine:
    """Return a line whose words begin at these places, with characters of one width."""
    middles = [start + step * (i + 0.5) for word, start in starts.items() for i in range(len(word))]
    left, end = min(starts.values()), right or max(middles) + step / 2
    return ReadLine(text, quad(left, 0, end, 20), (0.9,) * len(middles), tuple((x - left) / (end - left) for x in middles))


def test_a_line_may_be_cut_at_gaps_and_rules() -> None:
    (part,) = line_parts(read_line("ab cd ef", {"ab": 100, "cd": 124, "ef": 160}), LEVEL, verticals_of([]))
    assert (part.text, [cut.position for cut in part.cuts]) == ("ab cd ef", [5])
    assert 138 < part.cuts[0].left < part.cuts[0].right < 162
    (part,) = line_parts(read_line("abcd", {"abcd": 100}), LEVEL, verticals_of([(116.0, -50.0, 116.0, 50.0)]))
    assert [cut.position for cut in part.cuts] == [2]
    apart = line_parts(read_line("ab cd", {"ab": 100, "cd": 200}), LEVEL, verticals_of([]))
    assert [(line.text, round(line.box[0], -1)) for line in apart] == [("ab", 100), ("cd", 200)]


def test_a_box_ends_with_its_text() -> None:
    (part,) = line_parts(read_line("175.17", {"175.17": 100}, right=300), LEVEL, verticals_of([]))
    assert part.box[2] < 160


@pytest.mark.parametrize(
    "line", [ReadLine("a  b", quad(0, 0, 90, 20), (0.9, 0.9)), ReadLine("ab", quad(0, 0, 9, 90), (0.9, 0.9), (0.2, 0.8))]
)
def test_lines_that_are_not_cut(line: ReadLine) -> None:
    (part,) = line_parts(line, LEVEL, verticals_of([]))
    assert (part.text, part.cuts) == (" ".join(line.text.split()), ())
    assert part.box == inner_box(LEVEL.box_of(line.quad))


ROWS = (("Item", "Number", "Price"), ("apples", "12", "3.40"), ("pears and plums", "7", "1.25"), ("cherries", "30", "2.00"))


def table_page(ruled: bool) -> tuple[Image.Image, list[tuple[str, Quad]]]:
    """Return the picture of a table, and its lines as a reader finds them."""
    image, lines = Image.new("RGB", SIZE, "white"), list[tuple[str, Quad]]()
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(18)
    for row, texts in enumerate(ROWS):
        for column, text in enumerate(texts):
            left, top = 60 + 160 * column, 60 + 34 * row
            pen.text((left, top), text, font=font, fill="black")
            lines.append((text, quad(left - 4, top - 3, left + pen.textlength(text, font=font) + 4, top + 25)))
    if ruled:
        for y in range(52, 193, 34):
            pen.line((50, y, 530, y), fill="black", width=2)
        for x in (50, 210, 370, 530):
            pen.line((x, 52, x, 188), fill="black", width=2)
    return image, lines


def read_picture(image: Image.Image, lines: list[tuple[str, Quad]], monkeypatch: pytest.MonkeyPatch) -> PageRecord:
    """Return the record of a picture whose lines are found by a stand-in for RapidOCR."""
    columns = [list(column) for column in zip(*lines, strict=True)]
    result = SimpleNamespace(
        boxes=np.array(columns[1]),
        txts=columns[0],
        scores=[0.9] * len(lines),
        word_results=[[(((), ()), None, True)]] * len(lines),
    )
    reader, file = LinesReader(), BytesIO()
    monkeypatch.setitem(reader.__dict__, "_engine", lambda pixels: result)
    image.save(file, "png")
    task = PageTask(file.getvalue(), 1, PageFacts(*image.size, marks=100), "reading", "", 1.0)
    (record,) = reader.read([task], MediaPolicy(), StopSignal())
    return record


@pytest.mark.parametrize("ruled", [True, False])
@pytest.mark.parametrize("degrees", [0.0, 1.5])
def test_tables_of_scans(ruled: bool, degrees: float, monkeypatch: pytest.MonkeyPatch) -> None:
    image, lines = table_page(ruled)
    image = image.rotate(-degrees, Image.Resampling.BICUBIC, fillcolor="white")
    turned = [(text, quad(*corners[0], *corners[2], degrees)) for text, corners in lines]
    (block,) = read_picture(image, turned, monkeypatch).blocks
    assert (block.kind, block.source) == ("table", "reader")
    assert table_rows(block.cells) == [list(row) for row in ROWS]
    assert [cell.column for cell in block.cells if cell.header] == [0, 1, 2]
    assert block.box is not None
    assert block.box[0] == pytest.approx(50, abs=20)


def test_cells_are_told_apart_by_rules_only_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    image, lines = table_page(ruled=True)
    pen = ImageDraw.Draw(image)
    pen.rectangle((208, 54, 212, 84), fill="white")  # the first two cells of the header are one
    (block,) = read_picture(image, lines, monkeypatch).blocks
    assert [(cell.text, cell.column_span) for cell in block.cells if cell.row == 0] == [("Item Number", 2), ("Price", 1)]


@pytest.mark.parametrize(
    ("labels", "reads_turned", "is_turned"),
    [
        (["0", "0", "0", "0", "0", "180"], True, False),
        (["180", "180", "180", "180", "180", "0"], False, True),
        (["0", "180", "0"], True, True),
        (["180", "180", "0"], False, False),
    ],
)
def test_a_page_is_turned_as_a_whole(labels: list[str], reads_turned: bool, is_turned: bool) -> None:
    """The classifier sees the starts of lines. If it is unsure, lines are read in both directions."""
    pictures = [np.arange(20 * width * 3).reshape(20, width, 3).astype(np.uint8) for width in (60, 600, 80, 90, 70, 50)]
    pictures, seen, readings = pictures[: len(labels)], list[Any](), list[Any]()

    def classify(starts: list[Any]) -> Any:
        seen.extend(starts)
        return SimpleNamespace(cls_res=[(label, 0.9) for label in labels])

    def recognize(lines: list[Any]) -> Any:
        readings.append(lines)
        return SimpleNamespace(scores=[0.9 if (len(readings) == 2) is reads_turned else 0.6] * len(lines))

    engine: Any = SimpleNamespace(text_cls=classify, recognize_txt=recognize)
    turned, _ = LinesReader()._turned(engine, pictures)
    assert [start.shape[1] for start in seen] == [min(picture.shape[1], 80) for picture in pictures]
    expected = [picture[::-1, ::-1] if is_turned else picture for picture in pictures]
    assert all(np.array_equal(a, b) for a, b in zip(turned, expected, strict=True))
    assert len(readings) == (2 if len(labels) == 3 else 0)


def test_short_lines_of_a_page_on_its_side_are_turned() -> None:
    boxes = np.array([quad(0, 0, 20, 100), quad(30, 0, 50, 90), quad(60, 0, 80, 22)], np.float32)
    pictures = [np.zeros((20, width, 3), np.uint8) for width in (100, 90, 22)]  # as RapidOCR turns them
    pictures[2] = pictures[2].transpose(1, 0, 2)
    reader = LinesReader()
    assert [p.shape[:2] for p in reader._cropped(lambda *_: pictures, pictures[0], boxes)] == [(20, 100), (20, 90), (20, 22)]
    wide = np.array([quad(60, 0, 80, 22), quad(0, 0, 100, 20)], np.float32)
    assert reader._cropped(lambda *_: pictures[::-1][:2], pictures[0], wide)[0] is pictures[2]


@pytest.mark.parametrize("quarters", [0, 1, 2])
def test_a_real_reader_finds_a_table(quarters: int) -> None:
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    image, file = table_page(ruled=True)[0].rotate(90 * quarters, expand=True), BytesIO()
    image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC).save(file, "png")
    task = PageTask(file.getvalue(), 1, PageFacts(2 * image.width, 2 * image.height, marks=100), "reading", "", 1.0)
    (record,) = LinesReader().read([task], MediaPolicy(), StopSignal())
    assert [table_rows(block.cells) for block in record.blocks] == [[list(row) for row in ROWS]]
    assert all(line.confidence is not None for line in record.blocks[0].lines)


def test_memory_does_not_grow_with_the_widths_of_lines() -> None:
    """Sessions of onnxruntime keep no plan of memory per shape."""
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    engine = LinesReader()._engine
    for stage in (engine._load_det_model(), engine._load_cls_model(), engine._load_rec_model()):
        assert stage.session.args[0].session.get_session_options().enable_mem_pattern is False


def test_a_line_is_read_as_alone() -> None:
    """Lines beside it change neither its text nor its score."""
    pytest.importorskip("rapidocr", reason="needs the extra `documents`")
    pictures = [line_picture(text) for text in ("Total 17.40", "A line that is far longer than the others is read, too")]
    reader, stop = LinesReader(), StopSignal()
    assert reader.recognize(pictures, stop) == [reader.recognize([picture], stop)[0] for picture in pictures]


def line_picture(text: str) -> np.ndarray:
    image = Image.new("RGB", (20 * len(text), 40), "white")
    ImageDraw.Draw(image).text((8, 4), text, "black", ImageFont.load_default(28))
    return np.asarray(image)
