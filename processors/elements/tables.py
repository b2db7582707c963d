"""Tables in answers: OTSL tokens (DocTags, PaddleOCR-VL) and HTML, as cells.

Source of OTSL: arXiv 2305.03393.
"""

from __future__ import annotations

import re
from html import unescape

from .element import Cell

MAX_CELLS = 10_000
_MAX_ATTRIBUTES = 200  # characters of a tag that are searched for spans
_OTSL = re.compile(r"<(fcel|ecel|ched|rhed|srow|lcel|ucel|xcel|nl)>")
_WITHOUT_TEXT = ("lcel", "ucel", "xcel", "nl")
_HTML = re.compile(r"<(/?)(tr|td|th)\b([^<>]*)>", re.IGNORECASE)
_SPAN = re.compile(r"\b(row|col)span\s{0,4}=\s{0,4}[\"']?\s{0,4}(\d{1,4})", re.IGNORECASE)
_TAG = re.compile(r"<[A-Za-z_/!][^<>]*>")


def read_table(text: str) -> tuple[Cell, ...]:
    """Return the cells of the OTSL tables of a text, or else of its HTML tables; () without a table."""
    return _read_otsl(text) or _read_html(text)


def text_outside(text: str) -> str:
    """Return what a table's OTSL or HTML has outside of the cells of `read_table`, such as its caption, without tags."""
    if len(parts := _OTSL.split(text)) > 1:
        kinds, outside = parts[1::2], [parts[0]]
        outside += [content for kind, content in zip(kinds, parts[2::2], strict=True) if kind in _WITHOUT_TEXT]
    else:
        outside, end, is_cell = [], 0, False
        for tag in _HTML.finditer(text):
            outside.append("" if is_cell else text[end : tag.start()])
            end, is_cell = tag.end(), not tag[1] and tag[2].lower() != "tr"
        outside.append("" if is_cell else text[end:])
    return " ".join(" ".join(unescape(_TAG.sub(" ", part)) for part in outside).split())


def _read_otsl(text: str) -> tuple[Cell, ...]:
    parts = _OTSL.split(text)
    rows: list[list[tuple[str, str]]] = [[]]
    for kind, content in zip(parts[1 : 2 * MAX_CELLS : 2], parts[2 : 2 * MAX_CELLS + 1 : 2], strict=False):
        if kind == "nl":
            rows.append([])
        else:
            rows[-1].append((kind, content.strip()))

    def kind_at(row: int, column: int) -> str:
        return rows[row][column][0] if row < len(rows) and column < len(rows[row]) else ""

    cells = []
    for i, row in enumerate(rows):
        for j, (kind, content) in enumerate(row):
            if kind in _WITHOUT_TEXT:
                continue
            across = down = 1
            while kind_at(i, j + across) == "lcel":
                across += 1
            while kind_at(i + down, j) == "ucel":
                down += 1
            cells.append(Cell(i, j, content, down, across, kind in ("ched", "rhed", "srow")))
    return tuple(cells)


def _read_html(text: str) -> tuple[Cell, ...]:
    if "<td" not in (lower := text.lower()) and "<th" not in lower:
        return ()
    cells: list[Cell] = []
    covered: set[tuple[int, int]] = set()  # (row, column) of the lower rows of cells that span several
    max_covered = min(4 * len(text), 10 * MAX_CELLS)  # so that many small tables take no longer than their text
    row, column, tags = -1, 0, list(_HTML.finditer(text))
    for at, tag in enumerate(tags):
        closes, name, attributes = tag[1], tag[2].lower(), tag[3][:_MAX_ATTRIBUTES]
        if closes:
            continue
        if name == "tr":
            row, column = row + 1, 0
            continue
        spans = {direction.lower(): max(1, int(number)) for direction, number in _SPAN.findall(attributes)}
        down, across = min(spans.get("row", 1), 100), min(spans.get("col", 1), 100)
        row = max(row, 0)
        while (row, column) in covered:
            column += 1
        end = tags[at + 1].start() if at + 1 < len(tags) else len(text)
        cells.append(Cell(row, column, unescape(_TAG.sub("", text[tag.end() : end])).strip(), down, across, name == "th"))
        if len(cells) >= MAX_CELLS or len(covered) + (down - 1) * across > max_covered:
            break
        covered |= {(row + i, column + j) for i in range(1, down) for j in range(across)}
        column += across
    return tuple(cells)
