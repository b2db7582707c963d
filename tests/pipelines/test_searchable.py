"""Searchable PDFs: the text layer is what was read, where it was read, and the pages look as before."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from pdf_files import form_pdf, text_pdf
from PIL import Image, ImageDraw
from sensorium.callers.errors import InputError
from sensorium.mm.media import text_overlay
from sensorium.mm.media.page_facts import page_facts, page_pixels
from sensorium.mm.media.pdf import page_sizes
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.text_overlay import PageText, PlacedText, add_text
from sensorium.pipelines.documents.blocks import Block, Line, PageRecord
from sensorium.pipelines.documents.searchable import page_text, searchable_pdf

POLICY = MediaPolicy()
LINES = (
    PlacedText("Größe 12 % – ≤ Ωж", (40.0, 60.0, 240.0, 75.0)),
    PlacedText("漢字 𝔸 and more", (40.0, 80.0, 190.0, 92.0)),
    PlacedText("alone", (300.0, 200.0, 330.0, 209.0)),
)


def scan(pages: int = 1, suffix: str = "tiff") -> bytes:
    image, file = Image.new("RGB", (400, 300), "white"), BytesIO()
    ImageDraw.Draw(image).text((40, 60), "a scan", fill="black")
    image.putpixel((0, 0), (1, 2, 3))
    image.save(file, suffix, **({"save_all": True, "append_images": [image] * (pages - 1)} if pages > 1 else {}))
    return file.getvalue()


def with_text(data: bytes, lines: tuple[PlacedText, ...] = LINES, number: int = 1) -> bytes:
    return add_text(data, [PageText(number, lines)], POLICY).numpy().tobytes()


@pytest.mark.parametrize(
    "data",
    [text_pdf([[]]), text_pdf([[]], page="/Rotate 90"), text_pdf([[]], page="/Rotate 180"), text_pdf([[]], page="/Rotate 270"),
     text_pdf([[]], (500, 400), page="/CropBox[50 60 450 360]"), scan(), scan(suffix="png"), scan(suffix="jpeg")],
    ids=["plain", "90", "180", "270", "cropped", "tiff", "png", "jpeg"],
)  # fmt: skip
def test_text_and_boxes_are_those_that_were_read(data: bytes) -> None:
    (facts,) = page_facts(with_text(data), [1], POLICY)
    lines = sorted(facts.lines, key=lambda line: line.box[1])
    assert [line.text for line in lines] == [line.text for line in LINES]
    for line, expected in zip(lines, LINES, strict=True):
        assert line.box == pytest.approx(expected.box, abs=1.0)
    assert facts.invisible


@pytest.mark.parametrize(
    "data",
    [text_pdf([["a page", "# with text"]]), text_pdf([["a"]], page="/Rotate 90"), form_pdf(), form_pdf(appearances=False)],
    ids=["text", "turned", "form", "form without appearances"],
)
def test_pages_look_as_before(data: bytes) -> None:
    searchable = with_text(data)
    assert searchable != data
    assert (page_pixels(searchable, 1, POLICY) == page_pixels(data, 1, POLICY)).all()


@pytest.mark.parametrize("suffix", ["tiff", "png", "jpeg"])
def test_pictures_become_pages_with_their_pixels(suffix: str) -> None:
    data = scan(3 if suffix == "tiff" else 1, suffix)
    searchable, last = with_text(data, number=1), 3 if suffix == "tiff" else 1
    assert page_sizes(searchable, POLICY)[1] == [(400.0, 300.0)] * last
    points = MediaPolicy(pdf_dpi=72)
    for number in range(1, last + 1):
        assert (page_pixels(searchable, number, points) == page_pixels(data, number, POLICY)).all()


def test_pages_without_text_are_kept_and_equal_calls_give_equal_bytes() -> None:
    data = text_pdf([["one"], ["two"]])
    searchable = with_text(data, number=2)
    assert [len(facts.lines) for facts in page_facts(searchable, [1, 2], POLICY)] == [1, 4]
    assert with_text(data, number=2) == searchable
    assert with_text(searchable, number=1) == with_text(searchable, number=1)


def test_what_is_added_to_a_page(tmp_path: Path) -> None:
    line = Line("a  line", (1.0, 2.0, 3.0, 4.0))
    table = Block("table", "a\tb\nc\td", (0.0, 10.0, 100.0, 30.0), source="model")
    blocks = (Block("paragraph", "a line", lines=(line,), source="reader"), Block("paragraph", "its own"), table)
    text = page_text(PageRecord(3, 200.0, 100.0, 2.0, blocks=blocks))
    assert text == PageText(
        3,
        (
            PlacedText("a line", (1.0, 2.0, 3.0, 4.0)),
            PlacedText("a b", (0.0, 10.0, 100.0, 20.0)),
            PlacedText("c d", (0.0, 20.0, 100.0, 30.0)),
        ),
    )
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7")
    with pytest.raises(InputError):
        searchable_pdf(tmp_path / "a.pdf", [], POLICY)


def test_the_font_is_a_font() -> None:
    """fontTools reads all of its tables."""
    font = pytest.importorskip("fontTools.ttLib").TTFont(BytesIO(text_overlay._font()))
    assert font["OS/2"].sTypoAscender == font["hhea"].ascent == 1000
    assert font["hmtx"][font.getGlyphOrder()[0]] == (500, 0)
    assert font["name"].getDebugName(6) == "Invisible"
    assert all(table.cmap == {} for table in font["cmap"].tables)
