"""A document's pages as Markdown, JSON, plain text, HTML and CSV, and in the formats of `ocr_formats` and `docling`.

Each page is written before the next one is loaded.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...callers.errors import ErrorInfo
from .blocks import FURNITURE, Block, Line, PageRecord, joined, pixel_box
from .docling import docling
from .ocr_formats import alto, hocr
from .tables import csv_table, html_table, markdown_table

SUFFIXES = {
    "md": ".md",
    "json": ".json",
    "txt": ".txt",
    "html": ".html",
    "hocr": ".hocr",
    "alto": ".xml",
    "docling": ".docling.json",
    "csv": ".csv",
    "pdf": ".pdf",
}
"""Format -> end of the file's name. `searchable` writes PDFs."""
_SPECIAL = re.compile(r"([\\`*_\[\]<])")
_STARTS = re.compile(r"^(\s*)([#>+=|~-]|\d+(?=[.)]\s))")  # characters that mean something at the start of a line of Markdown
_ITEM = re.compile(r"^[•▪◦‣·○●■–*-]\s+")


@dataclass(frozen=True)
class Projected:
    """A document as it is written to a file: its source, the error if it cannot be opened, and its pages."""

    source: str
    error: ErrorInfo | None
    pages: Iterable[PageRecord]


def project(document: Projected, output_format: str) -> Iterator[str]:
    """Yield the parts of a document in a format of `SUFFIXES` but PDF. Bytes of its name that are not UTF-8 are escaped."""
    error = document.error and replace(document.error, text=_encodable(document.error.text))
    return _WRITERS[output_format](replace(document, source=_encodable(document.source), error=error))


def _encodable(text: str) -> str:
    """Return a text with a backslash and the code for each lone surrogate, which stands for a byte of a file's name."""
    return text.encode("utf-8", "backslashreplace").decode()


def _markdown(document: Projected) -> Iterator[str]:
    if document.error is not None:
        yield f"<!-- not read: {_comment(document.error.message)} -->\n"
    for index, page in enumerate(joined(document.pages)):
        yield "\n" if index else ""
        yield f"<!-- page {page.number} -->\n"
        if page.error is not None:
            yield f"\n<!-- page {page.number} was not read: {_comment(page.error.message)} -->\n"
        last = None
        for block in page.blocks:
            if block.kind in FURNITURE:
                continue
            yield "" if last == block.kind == "list_item" else "\n"
            yield f"{_markdown_of(block)}\n"
            last = block.kind


def _markdown_of(block: Block) -> str:
    if block.kind == "page":
        return block.text
    if block.kind == "table" and block.cells:
        return markdown_table(block.cells)
    if block.kind == "formula":
        return f"$$\n{block.text}\n$$"
    if block.kind == "code":
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return f"{fence}\n{block.text}\n{fence}"
    bullet = _ITEM.match(block.text) if block.kind == "list_item" else None
    text = block.text[bullet.end() :] if bullet else block.text
    if block.text_format == "plain":
        text = _SPECIAL.sub(r"\\\1", text)
    if block.kind == "list_item":
        return f"{'  ' * (block.level - 1)}{'- ' if bullet else ''}{text}"
    if block.text_format == "plain":
        text = _STARTS.sub(r"\1\\\2", text)
    if block.kind == "picture":
        return f"![{text}]()"
    return f"{'#' * max(block.level, 1)} {text}" if block.kind == "heading" else text


def _comment(text: str) -> str:
    return re.sub("-(?=-)", "- ", text)


def _text(document: Projected) -> Iterator[str]:
    """Yield the pages with a form feed between them, as pdftotext does."""
    if document.error is not None:
        yield f"[not read: {document.error.message}]\n"
    for index, page in enumerate(joined(document.pages)):
        yield "\f" if index else ""
        if page.error is not None:
            yield f"[page {page.number} was not read: {page.error.message}]\n"
        elif page.text:
            yield f"{page.text}\n"


def _json(document: Projected) -> Iterator[str]:
    """Yield one object, with a line for each page."""
    head = {"source": document.source, "error": _error(document.error)}
    yield f'{_dumps(head)[:-1]}, "pages": ['
    for index, page in enumerate(document.pages):
        yield "," if index else ""
        yield f"\n{_dumps(page_fields(page))}"
    yield "\n]}\n"


def page_fields(page: PageRecord) -> dict[str, Any]:
    """Return a page as JSON has it."""
    return {
        "page": page.number,
        "size": [page.width, page.height],
        "size_pixels": [round(side * page.scale) for side in (page.width, page.height)],
        "way": page.way,
        "reason": page.reason,
        "error": _error(page.error),
        "doubt": page.doubt,
        "confidence": page.confidence,
        **({"confidence_kind": page.confidence_kind} if page.confidence is not None else {}),
        **({"numbers": asdict(page.numbers)} if page.numbers is not None else {}),
        "blocks": [_block_fields(order, block, page.scale) for order, block in enumerate(page.blocks)],
    }


def _block_fields(order: int, block: Block, scale: float) -> dict[str, Any]:
    return {
        "order": order,
        "kind": block.kind,
        **({"level": block.level} if block.level else {}),
        **({"continues": True} if block.continues else {}),
        "text": block.text,
        "text_format": block.text_format,
        **({"cells": [asdict(cell) for cell in block.cells]} if block.cells else {}),
        "box": block.box,
        "box_pixels": block.box and pixel_box(block.box, scale),
        "confidence": block.confidence,
        **({"confidence_kind": block.confidence_kind} if block.confidence is not None else {}),
        **({"word_confidences": block.word_confidences} if block.word_confidences else {}),
        "source": block.source,
        "model": block.model or None,
        "lines": [_line_fields(line, scale) for line in block.lines],
    }


def _line_fields(line: Line, scale: float) -> dict[str, Any]:
    box_pixels = line.box and pixel_box(line.box, scale)
    fields = {"text": line.text, "box": line.box, "box_pixels": box_pixels, "confidence": line.confidence}
    return fields | ({"word_confidences": line.word_confidences} if line.word_confidences else {})


def _error(error: ErrorInfo | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.code, "message": error.message}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_HTML_TAGS = {"list_item": "li", "code": "pre", "page": "pre", "table": "pre", "formula": "pre", "caption": "figcaption"}


def _html(document: Projected) -> Iterator[str]:
    title = html.escape(document.source)
    yield f'<!DOCTYPE html>\n<html>\n<head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
    if document.error is not None:
        yield f'<p class="error">not read: {html.escape(document.error.message)}</p>\n'
    for page in joined(document.pages):
        yield f'<section id="page-{page.number}" data-way="{page.way}">\n'
        if page.error is not None:
            yield f'<p class="error">page {page.number} was not read: {html.escape(page.error.message)}</p>\n'
        is_list = False
        for block in page.blocks:
            if block.kind in FURNITURE:
                continue
            if is_list != (block.kind == "list_item"):
                is_list = not is_list
                yield "<ul>\n" if is_list else "</ul>\n"
            yield _html_of(block)
        yield "</ul>\n" if is_list else ""
        yield "</section>\n"
    yield "</body>\n</html>\n"


def _html_of(block: Block) -> str:
    tag = f"h{max(block.level, 1)}" if block.kind == "heading" else _HTML_TAGS.get(block.kind, "p")
    text = _ITEM.sub("", block.text) if block.kind == "list_item" else block.text
    box = "" if block.box is None else f' data-box="{" ".join(f"{side:g}" for side in block.box)}"'
    if block.kind == "table" and block.cells:
        return f"{html_table(block.cells, box)}\n"
    return f"<{tag}{box}>{html.escape(text)}</{tag}>\n"


def _hocr(document: Projected) -> Iterator[str]:
    return hocr(document.source, None if document.error is None else document.error.message, document.pages)


def _alto(document: Projected) -> Iterator[str]:
    return alto(document.source, None if document.error is None else document.error.message, document.pages)


def _docling(document: Projected) -> Iterator[str]:
    return docling(document.source, document.pages)


def _csv(document: Projected) -> Iterator[str]:
    """Yield the tables, with an empty line between two. One that goes on over pages is one."""
    tables = (block.cells for page in joined(document.pages) for block in page.blocks if block.cells)
    for index, cells in enumerate(tables):
        yield "\n" if index else ""
        yield csv_table(cells)


_WRITERS: dict[str, Callable[[Projected], Iterator[str]]] = {
    "md": _markdown,
    "json": _json,
    "txt": _text,
    "html": _html,
    "hocr": _hocr,
    "alto": _alto,
    "docling": _docling,
    "csv": _csv,
}
