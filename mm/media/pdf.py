"""Pages of PDF files as images, rendered by pypdfium2, and pages of TIFFs and animations. See `isolate` for the workers."""

from __future__ import annotations

import codecs
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...callers.errors import InputError, typed
from ..hashing import digest
from ..types import Media, MediaHeader
from .data_url import split_data_url
from .image import count_pages, decode_image, probe_image
from .image_pages import may_hold_pages
from .isolate import CodecRunner, run_isolated
from .ledger import MediaBudget
from .policy import (
    DEFAULT_POLICY,
    MediaPolicy,
    MediaUrl,
    PagesClock,
    PdfFile,
    PdfFiles,
    PdfPage,
    check_size,
    page_of,
    source_of,
)
from .source import read

MAX_PDFS = 16
"""Largest number of files with pages in the messages of one request: PDFs, and pictures with more than one page."""
OPENING_SECONDS = 5.0
"""Seconds that opening all PDFs in the messages of one request may take together."""

T = TypeVar("T")
POINTS = 72.0
"""Points per inch: the unit of a page's size."""
_AGAIN = "download or export it again"
_NO_PAGES = "the PDF has no pages; give one with at least one page"
_NO_COUNT, _PAGE = re.compile(rb"/Count\s+0\b"), re.compile(rb"/Type\s*/Page\b")
codecs.lookup("utf-16-le")  # pypdfium2 decodes texts with it, and a worker in its sandbox cannot import it any more
_MAX_TEXT = 1 << 18  # characters of a page's text layer
_BYTES = 8  # per pixel while a page is rendered (4) and copied as RGB (3), rounded up


def is_pdf(data: bytes) -> bool:
    """Return whether a file is a PDF. Other bytes may precede its header, as PDF readers allow."""
    return b"%PDF-" in data[:1024]


def holds_pictures(data: bytes) -> bool:
    """Return whether a file may hold several pictures, which are its pages."""
    return not is_pdf(data) and may_hold_pages(data)


class MessagePdfs:
    """PDFs, TIFFs and animations in the messages of one request. Limits their number, pages, bytes and time together."""

    def __init__(self, policy: MediaPolicy, tenant: str | None = None) -> None:
        self._policy, self._tenant = policy, tenant
        self._ledger = MediaBudget(policy).open(tenant)
        self._files: dict[int, PdfFile] = {}  # by id of the bytes, which the ledger keeps
        self._limit = self._seconds = min(policy.worker_seconds, OPENING_SECONDS)
        self._num_files = self._num_pages = 0

    def pages(self, url: str) -> list[PdfPage]:
        """Return the pages of the file in a data: URL: none for an image that cannot have several. Equal files are opened once.

        Raises:
            InputError: an error of `open_pdf`, or the files so far are too many, too large, or take too long to open.
        """
        with errors_of_media():
            data = read(MediaUrl(url), "image", self._policy, self._ledger)
        assert isinstance(data, bytes)
        is_image = (parts := split_data_url(url)) is not None and parts.media_type.startswith("image/")
        if is_image and not holds_pictures(data):
            return []
        file = self._files.get(id(data)) or self._open(data)
        self._files[id(data)] = file
        if len(file.sizes) == 1 and not is_pdf(data):
            return _pages(file)  # an image like any other
        self._num_files += 1
        if self._num_files > MAX_PDFS:
            reason = f"the messages hold more than {MAX_PDFS} files with pages; send fewer, or their pages as images"
            raise InputError(reason, code="over_limit", limit=MAX_PDFS)
        self._num_pages += len(file.sizes)
        if self._num_pages > (most := self._policy.max_pdf_pages):
            reason = f"the files of the messages have more than {most:,} pages (media: max_pdf_pages)"
            raise InputError(
                f"{reason}; send fewer", code="over_limit", param="max_pdf_pages", limit=most, value=self._num_pages
            )
        return _pages(file)

    def _open(self, data: bytes) -> PdfFile:
        try:
            file, seconds = open_pdf(data, replace(self._policy, worker_seconds=self._seconds), self._tenant)
        except InputError as error:
            if error.info.param != "worker_seconds":
                raise
            seconds = self._seconds
        self._seconds -= seconds
        if self._seconds <= 0:
            reason = f"opening the files with pages of the messages took longer than {self._limit:g} s"
            raise InputError(f"{reason}; send fewer or simpler ones, or their pages as images", param="worker_seconds")
        return file


def open_pdf(data: bytes, policy: MediaPolicy, tenant: str | None = None) -> tuple[PdfFile, float]:
    """Open a PDF in a worker that serves no other tenant. Return it with the seconds of CPU time that this took.

    Raises:
        InputError: it is broken, needs a password, has no pages, or has more than `policy.max_pdf_pages` pages.
    """
    with errors_of_media():
        count, sizes, seconds = run_isolated(page_sizes, data, policy, tenant=tenant)
        if not count:
            raise InputError(_NO_PAGES)
    if count > policy.max_pdf_pages:
        limit = f"the limit is {policy.max_pdf_pages:,} (media: max_pdf_pages)"
        kind = "PDF" if is_pdf(data) else "file"
        reason = f"the {kind} has {count:,} pages, {limit}; split it"
        raise InputError(reason, code="over_limit", param="max_pdf_pages", limit=policy.max_pdf_pages, value=count)
    return PdfFile(data, tuple(sizes)), seconds


def pdf_pages(file: object, policy: MediaPolicy = DEFAULT_POLICY) -> list[PdfPage]:
    """Return the pages of a PDF, TIFF or animation as images for prompts, messages and `ocr`.

    A page is rendered or decoded when it is used. Thumbnails of a TIFF are no pages; each frame of an animation is one.

    Args:
        file: path, open file, encoded bytes or http(s) URL.
        policy: limits of files and pages. The engine's own `media` options apply when a page is rendered.

    Raises:
        InputError: the file cannot be read, or an error of `open_pdf`.
    """
    with errors_of_media():
        data = read(file, "image", policy)
    if not isinstance(data, bytes):
        raise InputError(f"pdf_pages takes a path, an open file, bytes or a URL, not {typed(file)}", param="file")
    return _pages(replace(open_pdf(data, policy)[0], source=source_of(file)))


def _pages(file: PdfFile) -> list[PdfPage]:
    return [page_of(file, number) for number in range(1, len(file.sizes) + 1)]


@contextmanager
def errors_of_media() -> Iterator[None]:
    """Give input errors the code of an item that cannot be read."""
    try:
        yield
    except InputError as error:
        if error.info.code == "invalid_input":
            error.info = replace(error.info, code="invalid_media")
        raise


def share_files(items: Iterable[object]) -> list[object]:
    """Return items whose pages of local PDFs read each file once, see `PdfFiles`; other items are returned as they are."""
    files = PdfFiles()
    return [_with_files(item, files) for item in items]


def _with_files(item: object, files: PdfFiles) -> object:
    if type(item) is Media:  # not isinstance: the class of a broken item may not be readable
        return replace(item, data=_with_files(item.data, files))
    if type(item) is not PdfPage:
        return item
    page = replace(item)
    object.__setattr__(page, "opened", item.opened)
    object.__setattr__(page, "files", files)
    return page


def page_sizes(data: bytes, policy: MediaPolicy) -> tuple[int, list[tuple[float, float] | None], float]:
    """Return the number of pages, width and height of each in points, and the seconds of CPU time that this took.

    The size of a broken page, and of a page of another file than a PDF, is None. There are no sizes if there are more than
    `policy.max_pdf_pages` pages.
    """
    if holds_pictures(data):
        count, seconds = count_pages(data, policy)
        return count, [None] * (count if count <= policy.max_pdf_pages else 0), seconds
    began = time.thread_time()
    with opened_pdf(data) as document:
        count = len(document)
        sizes = [_points(document, i) for i in range(count)] if count <= policy.max_pdf_pages else []
    return count, sizes, time.thread_time() - began


def _points(document: Any, index: int) -> tuple[float, float] | None:
    try:
        width, height = document.get_page_size(index)
    except Exception:  # the page is broken: an item of it gives the error
        return None
    return (width, height) if math.isfinite(width) and math.isfinite(height) else None


def hash_page(page: PdfPage, policy: MediaPolicy) -> str:
    """Return the hash of a page whose file is bytes."""
    assert isinstance(page.file, bytes)
    file = page.opened or PdfFile(page.file)
    return digest("page", file.digest, page.number, policy.pdf_dpi, policy.background)


def probe(page: PdfPage, policy: MediaPolicy, run: CodecRunner) -> MediaHeader:
    """Return the size of a page in pixels. Only a page whose size is not known yet is sent to a worker."""
    points = page.opened.sizes[page.number - 1] if page.opened is not None and page.opened.sizes else None
    if points is None:
        return _timed(probe_timed, page, policy, run)
    return _header(points, policy)


def decode(page: PdfPage, policy: MediaPolicy, run: CodecRunner) -> Tensor:
    """Return the pixels of a page as `decode_page` does."""
    return _timed(decode_timed, page, policy, run)


def _timed(function: Callable[..., tuple[T, float]], page: PdfPage, policy: MediaPolicy, run: CodecRunner) -> T:
    """Return the first result of a function of a page; the second is its CPU time.

    Raises:
        InputError: an error of the function, or the pages of the file take longer than `max_pages_seconds` together.
    """
    clock = page.opened.clock if page.opened is not None else PagesClock()
    left = policy.max_pages_seconds - clock.seconds
    if left <= 0:
        raise _pages_error(policy)
    limit = min(policy.worker_seconds, left)
    try:
        result, seconds = run(function, page.file, page.number, policy, seconds=limit)
    except InputError as error:
        if error.info.param == "worker_seconds":
            clock.add(limit)
            if limit < policy.worker_seconds:
                raise _pages_error(policy) from None
        raise
    clock.add(seconds)
    return result


def _pages_error(policy: MediaPolicy) -> InputError:
    most = policy.max_pages_seconds
    reason = f"decoding the pages of its file took longer than {most:g} s (media: max_pages_seconds)"
    text = f"{reason}; give fewer pages, or raise the limit"
    return InputError(text, code="over_limit", param="max_pages_seconds", limit=most)


def probe_timed(data: bytes, number: int, policy: MediaPolicy) -> tuple[MediaHeader, float]:
    """Return the result of `probe_page`, and the seconds of CPU time that it took."""
    began = time.thread_time()
    return probe_page(data, number, policy), time.thread_time() - began


def decode_timed(data: bytes, number: int, policy: MediaPolicy) -> tuple[Tensor, float]:
    """Return the result of `decode_page`, and the seconds of CPU time that it took."""
    began = time.thread_time()
    return decode_page(data, number, policy), time.thread_time() - began


def probe_page(data: bytes, number: int, policy: MediaPolicy) -> MediaHeader:
    """Return the size in pixels of page `number`, counted from 1, at `policy.pdf_dpi`."""
    if holds_pictures(data):
        return probe_image(data, policy, number)
    with opened_page(data, number) as page:
        return _header(page.get_size(), policy)


def decode_page(data: bytes, number: int, policy: MediaPolicy) -> Tensor:
    """Return page `number`, counted from 1, as uint8 `[height, width, 3]` on white, at `policy.pdf_dpi`.

    Form fields are drawn with their values, and annotations as PDFium draws them.

    Raises:
        InputError: the PDF is broken or needs a password, has no such page, or the page exceeds a limit of the policy.
    """
    if holds_pictures(data):
        return decode_image(data, policy, number)
    with opened_page(data, number, with_forms=True) as page:
        return render(page, policy)


def render(page: Any, policy: MediaPolicy) -> Tensor:
    """Return an open page as `decode_page` does."""
    height, width = _header(page.get_size(), policy).size
    if height * width * _BYTES > policy.max_decoded_bytes:
        needed = f"decoding it needs {height * width * _BYTES:,} bytes, the limit is {policy.max_decoded_bytes:,}"
        raise InputError(f"{needed} (media: max_decoded_bytes); lower pdf_dpi", param="max_decoded_bytes")
    bitmap = page.render(scale=policy.pdf_dpi / POINTS, rev_byteorder=True)
    pixels = torch.from_numpy(bitmap.to_numpy()[..., :3].copy())  # [height, width, 3]
    bitmap.close()
    return pixels


def text_layer(page: PdfPage, policy: MediaPolicy, tenant: str | None = None) -> str:
    """Return the text that a page of a PDF holds itself, as its file orders it; "" without any, and for other files.

    Raises:
        InputError: as `decode_page`.
    """
    with errors_of_media():
        data = read(page, "image", policy)
    assert isinstance(data, PdfPage)
    if not isinstance(data.file, bytes) or not is_pdf(data.file):
        return ""
    return _timed(text_timed, data, policy, partial(run_isolated, tenant=tenant))


def text_timed(data: bytes, number: int, policy: MediaPolicy) -> tuple[str, float]:
    """Return the result of `page_text`, and the seconds of CPU time that it took."""
    began = time.thread_time()
    return page_text(data, number, policy), time.thread_time() - began


def page_text(data: bytes, number: int, policy: MediaPolicy) -> str:
    """Return the text of page `number`, counted from 1: at most its first 2**18 characters, a line per line."""
    with opened_page(data, number) as page:
        _header(page.get_size(), policy)
        text = page.get_textpage()
        try:
            return str(text.get_text_bounded()[:_MAX_TEXT]).replace("\r\n", "\n") if text.count_chars() > 0 else ""
        finally:
            text.close()


def _header(points: tuple[float, float], policy: MediaPolicy) -> MediaHeader:
    """Return the size in pixels as `render` rounds it, from width and height in points."""
    scale = policy.pdf_dpi / POINTS
    width, height = (-int(-side * scale // 1) for side in points)
    check_size(height, width, policy)
    return MediaHeader("image", height, width)


@contextmanager
def opened_page(data: bytes, number: int, with_forms: bool = False) -> Iterator[Any]:
    """Yield a page of a PDF, in a codec worker. Raise InputError if it cannot be opened."""
    with opened_pdf(data) as document:
        if with_forms:
            _load_forms(document)
        if not 1 <= number <= len(document):
            raise InputError(f"the PDF has {len(document):,} pages, so it has no page {number}; pages count from 1")
        try:
            page = document[number - 1]
        except RuntimeError:  # a PdfiumError, which names no reason
            raise InputError(f"page {number} of the PDF is broken or missing; {_AGAIN}") from None
        try:
            yield page
        finally:
            page.close()


def _load_forms(document: Any) -> None:
    """Make pages that are loaded from now on show the fields of forms, also those that the file's AcroForm does not list.

    PDFium makes the appearance of a field that has none. Without a JavaScript platform in the configuration, PDFium runs no
    script of the file; forms in XFA show their static pages.
    """
    import pypdfium2
    from pypdfium2 import raw

    config = raw.FPDF_FORMFILLINFO(version=2, xfa_disabled=True)
    handle = raw.FPDFDOC_InitFormFillEnvironment(document, config)
    if handle:
        document.formenv = pypdfium2.PdfFormEnv(handle, config)  # closed with the document


@contextmanager
def opened_pdf(data: bytes) -> Iterator[Any]:
    """Yield the document, in a codec worker. Errors of pdfium inside become InputErrors."""
    try:
        import pypdfium2
    except ImportError:
        raise InputError("PDFs need pypdfium2: pip install 'sensorium[pdf]'; or give the pages as images") from None
    if not data:
        raise InputError(f"the PDF is empty; {_AGAIN}")
    if not is_pdf(data):
        raise InputError(f"it is not a PDF (it has no header %PDF-); {_AGAIN}")
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise InputError(_why_closed(error.err_code, data)) from None
    try:
        yield document
    except pypdfium2.PdfiumError:
        raise InputError(f"the PDF cannot be read: it is broken; {_AGAIN}") from None
    finally:
        document.close()


def _why_closed(code: int | None, data: bytes) -> str:
    """Return why PDFium does not open a file. For a file without pages it leaves the code of the file before."""
    from pypdfium2 import raw

    if b"/Encrypt" in data and code == raw.FPDF_ERR_PASSWORD:
        return "the PDF cannot be read: it is encrypted; remove its password"
    if b"/Encrypt" in data and code == raw.FPDF_ERR_SECURITY:
        return "the PDF cannot be read: it is encrypted in an unknown way; save it without encryption"
    has_page = _PAGE.search(data) or b"/ObjStm" in data  # a compressed object may be a page
    if code == raw.FPDF_ERR_SUCCESS or (_NO_COUNT.search(data) and not has_page):
        return _NO_PAGES
    return f"the PDF cannot be read: it is broken or cut off; {_AGAIN}"
