"""Finds the files to read, counts their pages, and computes the keys of the page records."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TypeVar

from ...callers.errors import BusyError, ErrorInfo, InputError, short_repr, typed
from ...mm.media.image import probe_image
from ...mm.media.isolate import run_isolated
from ...mm.media.markup import count_chapters, is_epub, is_html
from ...mm.media.page_facts import PageFacts, page_facts, text_facts
from ...mm.media.pdf import POINTS, errors_of_media, holds_pictures, is_pdf, open_pdf
from ...mm.media.plain_text import TextPages, find_text_pages, is_text
from ...mm.media.policy import MediaPolicy
from ...mm.media.source import read
from ...mm.tenants import tenant_of
from ..files import SUFFIXES as MEDIA_SUFFIXES
from ..files import NamedItem, named_items
from .manifest import NAME, Ranges
from .model_answers import info_of
from .office import office_kind, office_pdf
from .options import ReadOptions, pages_within, parse_pages
from .page_task import PageReader
from .ways import RULES

T = TypeVar("T")
_OF_TEXT = ("md", "markdown", "txt", "text", "html", "htm", "xhtml")
SUFFIXES = (
    *("pdf", "epub", "docx", "pptx", "xlsx", "odt", "odp", "ods", "doc", "ppt", "xls", "rtf"),
    *_OF_TEXT,
)
"""Extensions of files that are read from a folder, beside those of pictures."""
_TRIES = 3  # while the machine is busy
_PAUSE = 1.0  # seconds before another try


@dataclass(frozen=True, eq=False)
class OpenedDocument:
    """A document whose pages are counted.

    Args:
        key: hash of its bytes, of the options and of the reader: the records of its pages have this key.
        ranges: the pages that are read; () if it cannot be opened.
        error: why it cannot be opened.
        text: the pages of a text file; None for other files.
    """

    source: str
    item: object
    key: str = ""
    ranges: Ranges = ()
    error: ErrorInfo | None = None
    data: bytes = field(default=b"", repr=False)
    text: TextPages | None = field(default=None, repr=False)

    @property
    def num_pages(self) -> int:
        """The number of pages that are read."""
        return sum(last - first + 1 for first, last in self.ranges)

    def closed(self) -> OpenedDocument:
        """Return it without its bytes."""
        return replace(self, data=b"", text=None)

    def failed(self, error: ErrorInfo) -> OpenedDocument:
        return replace(self.closed(), ranges=(), error=error)


def documents_of(items: Iterable[object]) -> list[NamedItem]:
    """Return the files that are named: paths, folders with their subfolders, patterns, URLs and bytes.

    Subfolders that hold the outputs of an earlier run are left out.
    """
    return list(named_items(items, "image", SUFFIXES, lambda folder: not os.path.lexists(os.path.join(folder, NAME))))


def open_document(item: NamedItem, options: ReadOptions, reader: PageReader, policy: MediaPolicy) -> OpenedDocument:
    """Return a document with its bytes, or with the error for which it cannot be opened."""
    document = OpenedDocument(item.source, item.item)
    try:
        if isinstance(item.item, InputError):
            raise item.item
        original = read_bytes(item.item, policy)
        data = pages_of_file(original, policy, options.convert_office)
        tenant = tenant_of(options.cache_salt)
        if is_text_document(data) and not is_epub(data):
            _check_name(item.source)
        text = _text_pages(data, policy, tenant) if _is_text_file(data) else None
        count = _count_pages(data, policy, tenant) if text is None else text.count
        ranges = pages_within(parse_pages(options.pages), count)
        if not ranges:
            reason = f"it has {count:,} pages, and <<pages=>>{short_repr(options.pages)} names none of them; give other pages"
            raise InputError(reason, param="pages", code="over_limit", limit=count)
    except InputError as error:
        return document.failed(error.info)
    return replace(document, key=_key(original, options, reader, policy), ranges=ranges, data=data, text=text)


def pages_of_file(data: bytes, policy: MediaPolicy, convert_office: bool = True) -> bytes:
    """Return a file that has pages: an office file becomes a PDF, others stay as they are.

    Raises:
        InputError: it cannot be converted, or office files are not.
    """
    kind = office_kind(data)
    if kind is not None and not convert_office:
        raise InputError(f"{kind} files are not converted here; send a PDF", code="unsupported")
    return data if kind is None else office_pdf(data, policy)


def is_text_document(data: bytes) -> bool:
    """Return whether a document is a book, HTML or text, whose pages have no size."""
    return is_epub(data) or is_html(data) or is_text(data)


def _check_name(source: str) -> None:
    """Raise InputError if a file of text has the name of a picture, PDF or office file: the text is probably an error's."""
    suffix = PurePosixPath(source.partition("?")[0]).suffix[1:].lower()
    if suffix not in _OF_TEXT and suffix in (*SUFFIXES, *MEDIA_SUFFIXES["image"]):
        reason = f"it holds text, and is named .{suffix}: its source may have sent an error in place of the file"
        raise InputError(f"{reason}; name it .txt or .html to read it all the same", code="invalid_media")


def _is_text_file(data: bytes) -> bool:
    return not (is_epub(data) or is_html(data)) and is_text(data)


def _text_pages(data: bytes, policy: MediaPolicy, tenant: str | None) -> TextPages:
    text = run_isolated(find_text_pages, data, policy, tenant=tenant)
    _within_limit(text.count, policy)
    return text


def _count_pages(data: bytes, policy: MediaPolicy, tenant: str | None) -> int:
    if is_epub(data):
        return run_isolated(count_chapters, data, policy, tenant=tenant)
    if is_html(data):
        return 1
    if not is_pdf(data) and not holds_pictures(data):
        with errors_of_media():  # a file of another kind is no document
            patiently(lambda: run_isolated(probe_image, data, policy, tenant=tenant))
        return 1
    try:
        return len(open_pdf(data, policy, tenant)[0].sizes)
    except InputError as error:
        if error.info.param != "max_pdf_pages":
            raise
        return _within_limit(int(error.info.value or 0), policy)


def _within_limit(count: int, policy: MediaPolicy) -> int:
    """Return a number of pages. Raise InputError if there are too many."""
    limit = policy.max_pdf_pages
    if count > limit:
        reason = f"it has {count:,} pages, the limit is {limit:,}; raise <<max_pages>>, or split it"
        raise InputError(reason, code="over_limit", param="max_pages", limit=limit, value=count) from None
    return count


def read_bytes(item: object, policy: MediaPolicy) -> bytes:
    """Return the bytes of a file.

    Raises:
        InputError: it cannot be read, or is no file.
    """
    data = read(item, "image", policy)
    if not isinstance(data, bytes):
        raise InputError(f"read takes a path, an open file, bytes or a URL, not {typed(item)}", param="files")
    return data


def read_policy(policy: MediaPolicy, options: ReadOptions) -> MediaPolicy:
    """Return the policy of documents: each page is decoded within its limits, and there may be more pages."""
    return replace(policy, max_pdf_pages=options.max_pages or policy.max_pdf_pages)


def scale_of(data: bytes, policy: MediaPolicy) -> float:
    """Return pixels per point of a document's rendered pages; 1 for pictures."""
    return policy.pdf_dpi / POINTS if is_pdf(data) else 1.0


def facts_of(
    document: OpenedDocument, numbers: list[int], policy: MediaPolicy, tenant: str | None = None
) -> Iterator[tuple[int, PageFacts | ErrorInfo]]:
    """Yield what pages hold, or why they cannot be opened. They are inspected together, or alone if one of them fails."""
    try:
        facts = patiently(lambda: _inspected(document, numbers, policy, tenant))
        yield from zip(numbers, facts, strict=True)
        return
    except Exception as error:
        if len(numbers) == 1:
            yield numbers[0], info_of(error)
            return
    for number in numbers:
        yield from facts_of(document, [number], policy, tenant)


def _inspected(document: OpenedDocument, numbers: list[int], policy: MediaPolicy, tenant: str | None) -> list[PageFacts]:
    """Return the facts of pages. For a text file, a codec worker gets only the bytes of these pages."""
    if (text := document.text) is None:
        return run_isolated(page_facts, document.data, numbers, policy, tenant=tenant)
    pages = [document.data[slice(*text.spans[number - 1])] for number in numbers]
    sizes = [len(page) for page in pages]
    return run_isolated(text_facts, b"".join(pages), sizes, text.kind, text.encoding, policy, tenant=tenant)


def patiently(function: Callable[[], T]) -> T:
    """Return the result of a function, which is called again while the machine is too busy."""
    for _ in range(_TRIES - 1):
        try:
            return function()
        except BusyError:
            time.sleep(_PAUSE)
    return function()


def _key(data: bytes, options: ReadOptions, reader: PageReader, policy: MediaPolicy) -> str:
    values = [RULES, hashlib.sha256(data).hexdigest(), options.text_layer, policy.pdf_dpi, policy.background, reader.digest]
    values += [] if options.max_characters is None else [options.max_characters]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
