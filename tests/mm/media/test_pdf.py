"""Pages of PDFs as images."""

from __future__ import annotations

import gc
import hashlib
import io
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sensorium import PdfPage, pdf_pages
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.media import gate, isolate, policy
from sensorium.mm.media import pdf as media_pdf
from sensorium.mm.media.ledger import MediaBudget
from sensorium.mm.media.pdf import open_pdf, share_files
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource, MultiModalDataParser
from sensorium.mm.types import Media

COLORS = [(200, 30, 40), (20, 180, 60), (10, 20, 220)]


@cache  # each file has the time at which it was made
def pdf(sizes: tuple[tuple[int, int], ...] = ((72, 144), (200, 100), (50, 50))) -> bytes:
    """Return a PDF at 72 dpi whose pages have one color each."""
    first, *others = [Image.new("RGB", size, color) for size, color in zip(sizes, COLORS, strict=False)]
    data = io.BytesIO()
    first.save(data, "PDF", save_all=True, append_images=others, resolution=72.0)
    return data.getvalue()


def source(data: bytes, number: int) -> MediaSource:
    return MediaSource("image", 0, PdfPage(data, number))


def test_a_page_has_the_size_of_its_header_and_its_color() -> None:
    policy = MediaPolicy(pdf_dpi=96.0)
    for number, (width, height) in enumerate(((96, 192), (267, 134), (67, 67)), 1):
        page = source(pdf(), number)
        (header,) = gate.probe(page, DecodeSpec(), policy)
        (item,) = gate.decode(page, DecodeSpec(), policy)
        assert (header.height, header.width) == (height, width) == tuple(item.pixels.shape[:2])
        assert np.abs(item.pixels[height // 2, width // 2].numpy().astype(int) - COLORS[number - 1]).max() <= 4


def test_the_hash_of_a_page_depends_on_file_number_and_resolution() -> None:
    fine = MediaPolicy(pdf_dpi=300.0)
    hashes = {gate.content_hash(source(pdf(), number), MediaPolicy()) for number in (1, 2)}
    hashes |= {gate.content_hash(source(pdf(((9, 9),)), 1), MediaPolicy()), gate.content_hash(source(pdf(), 1), fine)}
    assert len(hashes) == 4
    assert gate.content_hash(source(pdf(), 1), MediaPolicy()) in hashes


def test_pages_of_a_file_share_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf())
    pages = pdf_pages(tmp_path / "a.pdf")
    assert [page.number for page in pages] == [1, 2, 3]
    assert pages[0].file is pages[2].file
    assert pdf_pages(io.BytesIO(pdf())) == pages


def test_a_pdf_is_never_parsed_in_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(isolate, "_ask", lambda request, *rest: asked.append((request.name, rest[2])) or 1 / 0)
    with pytest.raises(MediaError):
        gate.probe(source(pdf(), 1), DecodeSpec(), MediaPolicy(), "a")
    with pytest.raises(ZeroDivisionError):
        open_pdf(b"", MediaPolicy(), "b")
    assert asked == [("probe_timed", "a"), ("page_sizes", "b")]


def test_limits() -> None:
    with pytest.raises(InputError, match="3 pages, the limit is 2") as caught:
        open_pdf(pdf(), MediaPolicy(max_pdf_pages=2))
    assert caught.value.info.param == "max_pdf_pages"
    with pytest.raises(MediaError, match="over the limit of 100 pixels"):
        gate.probe(source(pdf(), 1), DecodeSpec(), MediaPolicy(max_pixels=100))
    with pytest.raises(MediaError, match="lower pdf_dpi"):
        gate.decode(source(pdf(), 1), DecodeSpec(), MediaPolicy(max_decoded_bytes=1000))
    with pytest.raises(MediaError, match="has 3 pages, so it has no page 4"):
        gate.decode(source(pdf(), 4), DecodeSpec(), MediaPolicy())


@pytest.mark.parametrize("data", [b"%PDF-1.7 nothing", pdf()[:200], b"GIF89a %PDF-"])
def test_broken_files(data: bytes) -> None:
    with pytest.raises(InputError, match="broken or cut off") as error:
        open_pdf(data, MediaPolicy())
    assert error.value.info.code == "invalid_media"


def test_an_empty_file() -> None:
    with pytest.raises(InputError, match="the PDF is empty") as error:
        open_pdf(b"", MediaPolicy())
    assert error.value.info.code == "invalid_media"


def test_an_encrypted_file() -> None:
    """The smallest PDF with an encryption dictionary whose password is not empty."""
    entry = f"<</Filter/Standard/V 1/R 2/P -4/O<{'41' * 32}>/U<{'42' * 32}>>>"
    pages = "2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj"
    body = f"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n{pages}\n3 0 obj{entry}endobj\n"
    data = f"{body}trailer<</Root 1 0 R/Encrypt 3 0 R/ID[<00><00>]>>\n%%EOF".encode()
    with pytest.raises(InputError, match="it is encrypted") as error:
        open_pdf(data, MediaPolicy())
    assert error.value.info.code == "invalid_media"


def test_what_is_no_file() -> None:
    with pytest.raises(InputError, match="pdf_pages takes a path"):
        pdf_pages(np.zeros((3, 3)))


@pytest.mark.parametrize("file", [np.zeros((3, 3)), None, 1, PdfPage(b"", 1), Image.new("RGB", (3, 3)), [b""]])
def test_the_file_of_a_page_is_a_file(file: object) -> None:
    with pytest.raises(InputError, match="file must be a path, an open file, bytes or a URL, not ") as caught:
        PdfPage(file, 1)
    assert caught.value.info.param == "file"


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", None, 1 << 31, np.int64(1)])
def test_the_number_of_a_page(number: Any) -> None:
    with pytest.raises(InputError, match="give the number of a page, 1 or more") as caught:
        PdfPage(b"", number)
    assert caught.value.info.param == "number"


def test_a_page_is_an_image_item() -> None:
    parser = MultiModalDataParser(("image", "audio", "video", "vision_chunk"))
    for modality in ("audio", "video"):
        with pytest.raises(MediaError, match="a page of a PDF is an image; give it as an image item"):
            parser.parse({modality: [PdfPage(b"", 1)]})
    assert parser.parse({"vision_chunk": [{"type": "image", "image": PdfPage(b"", 1)}]})["vision_chunk"][0].kind == "image"


def test_pages_are_probed_and_their_file_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only decoding sends the file to a worker. The limits are those of the engine's own policy."""
    data, asked, hashed = pdf(), list[str](), list[int]()
    ask, sha256 = isolate._ask, hashlib.sha256
    monkeypatch.setattr(isolate, "_ask", lambda request, *rest: asked.append(request.name) or ask(request, *rest))
    pages = pdf_pages(data, MediaPolicy(max_pixels=1))
    counted = SimpleNamespace(sha256=lambda data: hashed.append(len(data)) or sha256(data))
    monkeypatch.setattr(policy, "hashlib", counted)
    for fine in (MediaPolicy(), MediaPolicy(pdf_dpi=99.0)):
        for page in pages:
            source = gate.load(MediaSource("image", 0, page), fine)
            alone = MediaSource("image", 0, PdfPage(data, page.number))
            found = gate.content_hash(source, fine)
            assert hashed == [len(data)]
            assert found == gate.content_hash(alone, fine)
            assert hashed.pop() == len(data)
            assert gate.probe(source, DecodeSpec(), fine) == [item.header for item in gate.decode(source, DecodeSpec(), fine)]
    assert asked == ["page_sizes", *["decode_timed"] * 6]
    with pytest.raises(MediaError, match="over the limit of 100 pixels"):
        gate.probe(MediaSource("image", 0, pages[0]), DecodeSpec(), MediaPolicy(max_pixels=100))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads of local files."""
    found: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            found.append(size or 0)
            return super().read(size)

    monkeypatch.setattr(os, "fdopen", lambda handle, *_, **__: Counted(handle, closefd=False))
    return found


def test_pages_of_a_local_file_read_and_hash_it_once(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one file, and those of pages in use."""
    hashed, sha256 = list[int](), hashlib.sha256
    counted = SimpleNamespace(sha256=lambda data: hashed.append(len(data)) or sha256(data))
    monkeypatch.setattr(policy, "hashlib", counted)
    files = {tmp_path / "a.pdf": pdf(), tmp_path / "b.pdf": pdf(((72, 72), (30, 40)))}
    for path, data in files.items():
        path.write_bytes(data)
    plain = [PdfPage(str(path) if number == 1 else path, number) for path in files for number in (1, 2)]
    items = [Media(page, max_pixels=9) if page.number == 1 else page for page in plain]
    shared = [item.data if isinstance(item, Media) else item for item in share_files(items)]
    assert shared == plain
    for page, data in zip(shared, [data for data in files.values() for _ in range(2)], strict=True):
        loaded = gate.load(MediaSource("image", 0, page), MediaPolicy())
        assert loaded.data == PdfPage(data, page.number)
        alone = gate.load(MediaSource("image", 0, PdfPage(page.file, page.number)), MediaPolicy())
        found = gate.content_hash(loaded, MediaPolicy())
        assert found == gate.content_hash(alone, MediaPolicy())
        assert gate.probe(loaded, DecodeSpec(), MediaPolicy()) == gate.probe(alone, DecodeSpec(), MediaPolicy())
    sizes = [len(data) for data in files.values()]
    assert sorted(reads) == sorted(hashed) == sorted(sizes * 3)  # once for shared pages, and for both that are alone
    del loaded
    gc.collect()
    assert len(shared[0].files._files) == 1
    path, data = tmp_path / "b.pdf", pdf(((9, 9),))
    path.write_bytes(data)  # a file that has changed is read again
    assert gate.load(MediaSource("image", 0, shared[-1]), MediaPolicy()).data == PdfPage(data, 2)


def test_items_without_a_local_file_share_nothing() -> None:
    pages = pdf_pages(pdf())
    image, *shared = share_files(["a.png", *pages])
    assert image == "a.png"
    assert [gate.load(MediaSource("image", 0, page), MediaPolicy()).data.opened for page in shared] == [pages[0].opened] * 3


def test_a_shared_file_counts_in_the_limits_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf())
    pages = share_files(PdfPage(tmp_path / "a.pdf", number) for number in (1, 2))
    with MediaBudget(MediaPolicy()).open() as ledger:
        for page in pages:
            gate.load(MediaSource("image", 0, page), MediaPolicy(), ledger)
        assert ledger.num_bytes == len(pdf())
    for page, changes in zip(pages, ({"max_request_bytes": 9}, {"max_bytes": 9}), strict=True):
        with pytest.raises(MediaError, match=next(iter(changes))):
            gate.load(MediaSource("image", 0, page), MediaPolicy(**changes))
    with pytest.raises(MediaError, match="cannot be read"):
        gate.load(MediaSource("image", 0, share_files([PdfPage(tmp_path / "b.pdf", 1)])[0]), MediaPolicy())


def test_a_page_with_another_file_knows_nothing_of_the_first() -> None:
    (page, *_) = pdf_pages(pdf())
    assert page.opened is not None
    assert replace(page, file=pdf(((9, 9),))).opened is None
    with pytest.raises(TypeError):
        PdfPage(b"", 1, opened=page.opened)  # type: ignore[call-arg]


def small_pdf(kids: str, count: int) -> bytes:
    pages = f"2 0 obj<</Type/Pages/Kids[{kids}]/Count {count}>>endobj"
    return f"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n{pages}\ntrailer<</Root 1 0 R>>\n%%EOF".encode()


def test_a_file_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """pdfium itself refuses most of them."""
    monkeypatch.setattr(media_pdf, "run_isolated", lambda *args, **options: (0, [], 0.0))
    with pytest.raises(InputError, match="the PDF has no pages; give one with at least one page"):
        pdf_pages(pdf())


def test_pages_that_are_missing_fail_alone() -> None:
    *_, page = pdf_pages(small_pdf("9 0 R", 3))
    assert page.number == 3
    with pytest.raises(MediaError, match="page 3") as caught:
        gate.probe(MediaSource("image", 0, page), DecodeSpec(), MediaPolicy())
    info = caught.value.info
    assert (info.code, info.modality, info.index) == ("invalid_media", "image", 0)
