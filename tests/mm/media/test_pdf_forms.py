"""Form fields and annotations of PDFs, and the reasons for which files are refused."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from pdf_files import FIELDS, encrypted_pdf, form_pdf, pdf_of
from PIL import Image
from sensorium import PdfPage, pdf_pages
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.media import gate
from sensorium.mm.media.pdf import decode_page
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource

POINTS = MediaPolicy(pdf_dpi=72.0)  # a pixel is a point
WITHOUT_SCRIPTS = form_pdf(appearances=False)


def rendered(data: bytes) -> np.ndarray:
    (item,) = gate.decode(MediaSource("image", 0, PdfPage(data, 1)), DecodeSpec(), POINTS)
    return item.pixels.numpy()


def part(pixels: np.ndarray, place: tuple[int, int, int, int]) -> np.ndarray:
    left, bottom, right, top = place
    return pixels[200 - top : 200 - bottom, left:right]


def test_fields_are_drawn_with_their_appearances() -> None:
    pixels = rendered(form_pdf())
    for name, (_, place, color) in FIELDS.items():
        assert (part(pixels, place) == color).all(), name
    assert (part(pixels, (10, 20, 110, 40)) == (128, 0, 0)).all()  # the stamp
    assert (part(pixels, (121, 21, 189, 39)) == (255, 255, 0)).all()  # the highlight


@pytest.mark.parametrize("acro_form", [None, "/Fields[]", "/Fields[10 0 R]/XFA 99 0 R"])
def test_fields_that_the_document_does_not_list_are_drawn(acro_form: str | None) -> None:
    """Programs that join PDFs leave the list out."""
    assert np.array_equal(rendered(form_pdf(acro_form=acro_form)), rendered(form_pdf()))


@pytest.mark.parametrize("acro_form", ["/Fields[10 0 R 11 0 R 12 0 R 13 0 R 14 0 R]/NeedAppearances true", "/Fields[]", None])
def test_fields_without_appearances_show_their_values(acro_form: str | None) -> None:
    pixels, empty = rendered(form_pdf(False, acro_form)), rendered(form_pdf(False, acro_form).replace(b"HELLO", b"     "))
    for name in ("text", "tick", "combo", "list"):
        ink = (part(pixels, FIELDS[name][1]) < 128).any(-1)
        assert ink.any(), name
    text = part(pixels, FIELDS["text"][1]) != part(empty, FIELDS["text"][1])
    assert np.flatnonzero(text.any((0, 2))).max() < 50  # five letters of 12 points from the left, of 100
    untouched = pixels.copy()
    part(untouched, FIELDS["text"][1])[:] = part(empty, FIELDS["text"][1])
    assert np.array_equal(untouched, empty)


def test_a_turned_page_has_its_fields() -> None:
    assert np.array_equal(rendered(form_pdf(page="/Rotate 90")), np.rot90(rendered(form_pdf()), -1))


def test_scripts_do_not_run() -> None:
    """A script would write into the field or add a page."""
    script = "<</S/JavaScript/JS(this.getField('text').value = 'CHANGED'; this.newPage\\(\\);)>>"
    data = form_pdf(appearances=False, acro_form=f"/Fields[10 0 R]/CO[10 0 R]/JavaScript{script}", page=f"/AA<</O {script}>>")
    data = data.replace(b"/Type/Catalog", f"/Type/Catalog/OpenAction{script}".encode())
    data = data.replace(b"/FT/Tx", f"/FT/Tx/AA<</F {script}/C {script}/K {script}/V {script}>>".encode())
    assert np.array_equal(rendered(data), rendered(WITHOUT_SCRIPTS))
    assert len(pdf_pages(data)) == 1


def test_hidden_fields_stay_hidden() -> None:
    hidden = form_pdf().replace(b"/F 4/Rect[10 170", b"/F 2/Rect[10 170")
    assert (part(rendered(hidden), FIELDS["text"][1]) == 255).all()


@pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="needs pdftoppm of poppler-utils")
@pytest.mark.parametrize("acro_form", [None, "/Fields[10 0 R 11 0 R 12 0 R 13 0 R 14 0 R 15 0 R]"])
def test_fields_are_those_of_poppler(acro_form: str | None, tmp_path: Path) -> None:
    (tmp_path / "form.pdf").write_bytes(form_pdf(acro_form=acro_form))
    command = ["pdftoppm", "-r", "72", "-png", "-singlefile", tmp_path / "form.pdf", tmp_path / "form"]
    subprocess.run(command, check=True, timeout=60)
    expected, pixels = np.asarray(Image.open(tmp_path / "form.png").convert("RGB")), rendered(form_pdf(acro_form=acro_form))
    for _, place, _ in FIELDS.values():
        assert np.array_equal(part(pixels, place), part(expected, place))


def test_the_limits_of_pages_hold_for_forms() -> None:
    with pytest.raises(MediaError, match="over the limit of 100 pixels"):
        gate.decode(MediaSource("image", 0, PdfPage(form_pdf(), 1)), DecodeSpec(), MediaPolicy(max_pixels=100))


def test_a_file_whose_owner_alone_has_a_password_is_read() -> None:
    page = rendered(encrypted_pdf(b""))
    assert (page[:, :50] == (255, 0, 0)).all()
    assert (page[:, 50:] == 255).all()
    with pytest.raises(InputError, match="it is encrypted"):
        pdf_pages(encrypted_pdf(b"user"))


def empty_pdf() -> bytes:
    import pypdfium2

    data = io.BytesIO()
    pypdfium2.PdfDocument.new().save(data)
    return data.getvalue()


def no_pages(kids: str) -> bytes:
    return pdf_of({1: "<</Type/Catalog/Pages 2 0 R>>", 2: f"<</Type/Pages{kids}/Count 0>>"})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the PDF is empty; download"),
        (b"\0" * 2000, r"it is not a PDF \(it has no header %PDF-\)"),
        (b"%PDF", r"it is not a PDF \(it has no header %PDF-\)"),
        (b"%PDF-1.7", "the PDF cannot be read: it is broken or cut off; download"),
        (form_pdf()[:500], "the PDF cannot be read: it is broken or cut off; download"),
        (empty_pdf(), "the PDF has no pages; give one with at least one page"),
        (no_pages("/Kids[]"), "the PDF has no pages; give one with at least one page"),
        (encrypted_pdf(b"").replace(b"/Standard", b"/Unknown!"), "it is encrypted in an unknown way; save it without"),
    ],
)
def test_the_reason_is_that_of_the_file(data: bytes, reason: str) -> None:
    """PDFium has no code for some of them, and then still shows that of the file before."""
    for before in (None, encrypted_pdf(b"user"), b"%PDF-1.7"):
        if before is not None:
            with pytest.raises(InputError):
                pdf_pages(before)
        with pytest.raises(InputError, match=reason) as caught:
            pdf_pages(data)
        assert "PDFium" not in str(caught.value)


def test_a_page_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="page 1"):
        decode_page(no_pages(""), 1, POINTS)
