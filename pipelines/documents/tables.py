"""Tables as Markdown, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence

from ...engine.elements import Cell
from .blocks import table_rows


def markdown_table(cells: Sequence[Cell]) -> str:
    """Return a table with `|`, or in HTML if a cell spans several rows or columns, which Markdown cannot say."""
    if any(cell.row_span > 1 or cell.column_span > 1 for cell in cells):
        return html_table(cells)
    rows = table_rows(cells)
    width = max(map(len, rows))  # Markdown ignores cells beyond those of the first row
    first = rows[0] + [""] * (width - len(rows[0]))
    return "\n".join(map(_markdown_row, (first, ["---"] * width, *rows[1:])))


def _markdown_row(row: Sequence[str]) -> str:
    texts = (re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())) for text in row)
    return f"| {' | '.join(texts)} |"


def html_table(cells: Sequence[Cell], attributes: str = "") -> str:
    """Return a table as HTML on one line."""
    rows = list[list[str]]()
    for cell in cells:
        while len(rows) <= cell.row:
            rows.append([])
        spans = f' rowspan="{cell.row_span}"' if cell.row_span > 1 else ""
        spans += f' colspan="{cell.column_span}"' if cell.column_span > 1 else ""
        tag = "th" if cell.header else "td"
        rows[cell.row].append(f"<{tag}{spans}>{html.escape(cell.text, quote=False)}</{tag}>")
    lines = (f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table{attributes}>{''.join(lines)}</table>"


def csv_table(cells: Sequence[Cell]) -> str:
    """Return a table as CSV (RFC 4180, with line feeds). A cell that spans several rows or columns stands in the first one."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(table_rows(cells))
    return file.getvalue()
