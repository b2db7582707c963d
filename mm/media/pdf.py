"""Pages of PDF files as images, rendered by pypdfium2. The functions run in codec workers; see `isolate`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, typed
from ..hashing import digest
from ..types import Media, MediaHeader
from .isolate import CodecRunner, run_isolated
from .ledger import MediaBudget
from .policy import DEFAULT_POLICY, MediaPolicy, MediaUrl, PdfFile, PdfFiles, PdfPage, check_size, page_of
from .source import read

MAX_PDFS = 16
"""Largest number of PDFs in the messages of one request."""
OPENING_SECONDS = 5.0
"""Seconds that opening all PDFs in the messages of one request may take together."""

_POINTS = 72.0  # points per inch: the unit of a page's size
_BYTES = 8  # per pixel while a page is rendered (4) and copied as RGB (3), rounded up


def is_pdf(data: bytes) -> bool:
    """Return whether a file is a PDF. Other bytes may precede its header, as PDF readers allow."""
    return b"%PDF-" in data[:1024]


class MessagePdfs:
    """PDFs in the messages of one request. Limits their number, pages, bytes and time together."""

    def __init__(self, policy: MediaPolicy, tenant: str | None = None) -> None:
        self._policy, self._tenant = policy, tenant
        self._ledger = MediaBudget(policy).open(tenant)
        self._files: dict[int, PdfFile] = {}  # by id of the bytes, which the ledger keeps
        self._limit = self._seconds = min(policy.worker_seconds, OPENING_SECONDS)
        self._num_files = self._num_pages = 0

    def pages(self, url: str) -> list[PdfPage]:
        """Return the pages of the PDF in a data: URL. Equal files are opened once.

        Raises:
            InputError: an error of `open_pdf`, or the PDFs so far are too many, too large, or take too long to open.
        """
        self._num_files += 1
        if self._num_files > MAX_PDFS:
            raise InputError(f"the messages hold more than {MAX_PDFS} PDFs; send fewer, or their pages as images")
        data = read(MediaUrl(url), "image", self._policy, self._ledger)
        assert isinstance(data, bytes)
        file = self._files.get(id(data)) or self._open(data)
        self._files[id(data)] = file
        self._num_pages += len(file.sizes)
        if self._num_pages > (most := self._policy.max_pdf_pages):
            reason = f"the PDFs of the messages have more than {most:,} pages (media: max_pdf_pages)"
            raise InputError(f"{reason}; send fewer", param="max_pdf_pages")
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
            reason = f"opening the PDFs of the messages took longer than {self._limit:g} s"
            raise InputError(f"{reason}; send fewer or simpler ones, or their pages as images", param="worker_seconds")
        return file


def open_pdf(data: bytes, policy: MediaPolicy, tenant: str | None = None) -> tuple[PdfFile, float]:
    """Open a PDF in a worker that serves no other tenant. Return it with the seconds that this took.

    Raises:
        InputError: it is broken, encrypted, empty, or has more than `policy.max_pdf_pages` pages.
    """
    count, sizes, seconds = run_isolated(page_sizes, data, policy, tenant=tenant)
    if not count:
        raise InputError("the PDF has no pages; give one with at least one page")
    if count > policy.max_pdf_pages:
        raise InputError(
            f"the PDF has {count:,} pages, the limit is {policy.max_pdf_pages:,} (media: max_pdf_pages); split it",
            param="max_pdf_pages",
        )
    return PdfFile(data, tuple(sizes)), seconds


def pdf_pages(file: object, policy: MediaPolicy = DEFAULT_POLICY) -> list[PdfPage]:
    """Return the pages of a PDF as images for prompts, messages and `ocr`. A page is rendered when it is used.

    Args:
        file: path, open file, encoded bytes or http(s) URL.
        policy: limits of files and pages. The engine's own `media` options apply when a page is rendered.

    Raises:
        InputError: the file cannot be read, or an error of `open_pdf`.
    """
    data = read(file, "image", policy)
    if not isinstance(data, bytes):
        raise InputError(f"pdf_pages takes a path, an open file, bytes or a URL, not {typed(file)}", param="file")
    return _pages(open_pdf(data, policy)[0])


def _pages(file: PdfFile) -> list[PdfPage]:
    return [page_of(file, number) for number in range(1, len(file.sizes) + 1)]


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
    """Return the number of pages, width and height of each in points, and the seconds that this took.

    The size of a broken page is None. There are no sizes if there are more than `policy.max_pdf_pages` pages.
    """
    began = time.monotonic()
    with _opened(data) as document:
        count = len(document)
        sizes = [_points(document, i) for i in range(count)] if count <= policy.max_pdf_pages else []
    return count, sizes, time.monotonic() - began


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
    return digest("page", file.digest, page.number, policy.pdf_dpi)


def probe(page: PdfPage, policy: MediaPolicy, run: CodecRunner) -> MediaHeader:
    """Return the size of a page in pixels. Only a page whose size is not known yet is sent to a worker."""
    points = page.opened.sizes[page.number - 1] if page.opened is not None and page.opened.sizes else None
    if points is None:
        return run(probe_page, page.file, page.number, policy)
    return MediaHeader("image", *_size(points, policy))


def probe_page(data: bytes, number: int, policy: MediaPolicy) -> MediaHeader:
    """Return the size in pixels of page `number`, counted from 1, at `policy.pdf_dpi`."""
    with _page(data, number) as page:
        return MediaHeader("image", *_size(page.get_size(), policy))


def decode_page(data: bytes, number: int, policy: MediaPolicy) -> Tensor:
    """Return page `number`, counted from 1, as uint8 `[height, width, 3]` on white, at `policy.pdf_dpi`.

    Raises:
        InputError: the PDF is broken or encrypted, has no such page, or the page exceeds a limit of the policy.
    """
    with _page(data, number) as page:
        height, width = _size(page.get_size(), policy)
        if height * width * _BYTES > policy.max_decoded_bytes:
            needed = f"decoding it needs {height * width * _BYTES:,} bytes, the limit is {policy.max_decoded_bytes:,}"
            raise InputError(f"{needed} (media: max_decoded_bytes); lower pdf_dpi", param="max_decoded_bytes")
        bitmap = page.render(scale=policy.pdf_dpi / _POINTS, rev_byteorder=True)
        pixels = torch.from_numpy(bitmap.to_numpy()[..., :3].copy())  # [height, width, 3]
        bitmap.close()
    return pixels


def _size(points: tuple[float, float], policy: MediaPolicy) -> tuple[int, int]:
    """Return height and width in pixels as `render` rounds them, from width and height in points."""
    scale = policy.pdf_dpi / _POINTS
    width, height = (-int(-side * scale // 1) for side in points)
    check_size(height, width, policy)
    return height, width


@contextmanager
def _page(data: bytes, number: int) -> Iterator[Any]:
    with _opened(data) as document:
        if not 1 <= number <= len(document):
            raise InputError(f"the PDF has {len(document):,} pages, so it has no page {number}; pages count from 1")
        page = document[number - 1]
        try:
            yield page
        finally:
            page.close()


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Yield the document. Errors of pdfium inside become InputErrors."""
    try:
        import pypdfium2
    except ImportError:
        raise InputError("PDFs need pypdfium2: pip install 'sensorium[pdf]'; or give the pages as images") from None
    if not data:
        raise InputError("the PDF is empty; download or export it again")
    try:
        document = pypdfium2.PdfDocument(data)
        try:
            yield document
        finally:
            document.close()
    except pypdfium2.PdfiumError as error:
        broken = f"it is broken or cut off ({error}); download or export it again"
        reason = "it is encrypted; remove its password" if "assword" in str(error) else broken
        raise InputError(f"the PDF cannot be read: {reason}") from None
