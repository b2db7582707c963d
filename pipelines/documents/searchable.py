"""Searchable PDFs: the file as it is, with invisible text on the pages that a reader or a model has read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...callers.errors import InputError
from ...mm.media.isolate import run_isolated
from ...mm.media.policy import MediaPolicy
from ...mm.media.text_overlay import PageText, PlacedText, add_text
from .blocks import PageRecord
from .inputs import is_text_document, pages_of_file, read_bytes
from .ocr_formats import placed_lines

_PAGE_SECONDS = 0.5  # of a worker for each page, besides those of an item


def searchable_pdf(item: object, pages: Iterable[PageRecord], policy: MediaPolicy) -> bytes:
    """Return the file of an item as a PDF with the text of pages.

    Raises:
        InputError: the file cannot be read or changed.
    """
    texts = [text for page in pages if (text := page_text(page)).lines]
    data = pages_of_file(read_bytes(item, policy), policy)
    if is_text_document(data):
        raise InputError("it is text without pages, so no PDF is made of it; choose another format", code="unsupported")
    seconds = policy.worker_seconds + _PAGE_SECONDS * len(texts)
    return run_isolated(add_text, data, texts, policy, seconds=seconds).numpy().tobytes()


def page_text(page: PageRecord) -> PageText:
    """Return the lines to add to a page: none if its text is its own text layer."""
    points = replace(page, scale=1.0)
    lines = (line for block in page.blocks if block.source != "text_layer" for line in placed_lines(points, block))
    return PageText(page.number, tuple(PlacedText(" ".join(line.text.split()), box) for line, box in lines))
