"""LaTeX tables (`tabular` and its relatives) in answers, as cells.

Sources: LaTeX2e's unofficial reference manual (tabular), and the manuals of booktabs, multirow and longtable.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from .element import Cell
from .tables import MAX_CELLS

_ENVIRONMENTS = r"(?:tabular[*xy]?|longtable|supertabular|xltabular)"
BEGIN = re.compile(rf"\\begin\s*\{{({_ENVIRONMENTS})\}}")
"""The beginning of a table."""
_WITH_WIDTH = ("tabular*", "tabularx", "tabulary", "xltabular")
_ENDS = re.compile(rf"\\(begin|end)\s*\{{{_ENVIRONMENTS}\}}")
_TOKEN = re.compile(
    r"""\\begin\s*\{[^{}]*\}|\\end\s*\{[^{}]*\}   # of an environment in a cell
    |\\\\\*?(?:\s*\[[^\[\]]*\])?|\\tabularnewline\b|\\cr\b   # the end of a row
    |(?<!\\)%[^\n]*(?:\n|$)|\\[^\S\n]?.|[&{}]""",
    re.VERBOSE,
)
_RULE = re.compile(
    r"""\s*\\(?:(hline|midrule|endhead|endfirsthead)\b(?:\s*\[[^\[\]]*\])?
    |(?:toprule|bottomrule|addlinespace|endfoot|endlastfoot)\b(?:\s*\[[^\[\]]*\])?
    |(?:cline|cmidrule|hhline|noalign|rowcolor|Xhline|specialrule)\b(?:\s*\([^()]*\))?(?:\s*\[[^\[\]]*\])*(?:\s*\{[^{}]*\})*)""",
    re.VERBOSE,
)
_SPAN = re.compile(r"\s*\\multi(column|row)\s*(?:\[[^\[\]]*\]\s*)?(?=\{)")
_FONTS = r"textbf|textit|textrm|textsf|texttt|textsc|textnormal|text|emph|underline|mbox|makecell|thead|shortstack"
_FONT = re.compile(rf"\\(?:{_FONTS})(?:\s*\[[^\[\]]*\])?\s*(?=\{{)|\\(?:bfseries|itshape|centering|small|tiny|bf|it)\b\s*")
_ESCAPED = re.compile(r"\\([&%#_{}])")
_NESTED = re.compile(rf"\\(?:begin|end)\s*\{{{_ENVIRONMENTS}\}}(?:\s*\{{[^{{}}]*\}})?")
_MATH = re.compile(r"(\$[^$]*\$|\\\((?:(?!\\[()]).)*\\\))", re.DOTALL)
_MAX_SPAN = 100  # rows or columns of a cell
_MAX_RULES = 64  # between two rows


@dataclass
class _Row:
    """A row: its cells' LaTeX, and the rules above it, `hline`, `midrule`, `endhead` or `endfirsthead`."""

    cells: list[str] = field(default_factory=list)
    rules: set[str] = field(default_factory=set)


def table_end(lines: Sequence[str], at: int, start: int) -> tuple[int, int] | None:
    """Return the line and the column after the end of the table that begins in line `at` at column `start`, or None.

    Tables in its cells are part of it.
    """
    depth = 0
    for index in range(at, len(lines)):
        for mark in _ENDS.finditer(lines[index], start if index == at else 0):
            depth += 1 if mark[1] == "begin" else -1
            if depth <= 0:
                return index, mark.end()
    return None


def read_latex_table(text: str) -> tuple[Cell, ...]:
    """Return the cells of a table, from its `\\begin` to its `\\end`; () if it has none.

    Rows above the first inner rule are a header: above `\\midrule` or `\\endhead`, or above the only `\\hline` between two
    rows.
    """
    begin = BEGIN.match(text)
    end = table_end([text], 0, 0)
    if begin is None or end is None:
        return ()
    at = begin.end()
    for _ in range(1 + (begin[1] in _WITH_WIDTH)):
        at = _after_argument(text, at)
    rows = list(_rows(text[at : text.rindex("\\end", 0, end[1])]))
    return tuple(_with_spans(_cells([row for row in rows if any(cell.strip() for cell in row.cells)], _header(rows))))


def _after_argument(text: str, at: int) -> int:
    """Return the index after an argument in braces, and after options in brackets before it."""
    while (option := re.compile(r"\s*\[[^\[\]]*\]").match(text, at)) is not None:
        at = option.end()
    opening = re.compile(r"\s*\{").match(text, at)
    return at if opening is None else closing_brace(text, opening.end() - 1) + 1


def closing_brace(text: str, at: int) -> int:
    """Return the index of the brace that closes the one at an index, or of the last character."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth and brace[0] == "}":
            return brace.start()
    return len(text) - 1


def _rows(body: str) -> Iterator[_Row]:
    """Yield the rows of the inside of a table, with empty ones for rules after the last row."""
    row, cell, depth, inner, at, count = _Row(), list[str](), 0, 0, 0, 0
    for token in _TOKEN.finditer(body):
        cell.append(body[at : token.start()])
        at, text = token.end(), token[0]
        if text.startswith("%"):
            continue
        inner += text.startswith("\\begin") - text.startswith("\\end")
        depth += (text == "{") - (text == "}")
        is_end = text.startswith(("\\\\", "\\tabularnewline", "\\cr"))
        if depth > 0 or inner > 0 or not (is_end or text == "&"):
            cell.append(text)
            continue
        _add(row, "".join(cell))
        cell, count = [], count + 1
        if is_end:
            yield row
            row = _Row()
        if count >= MAX_CELLS:
            yield row
            return
    _add(row, "".join([*cell, body[at:]]))
    yield row


def _add(row: _Row, text: str) -> None:
    """Add a cell to a row. The first one may begin with rules."""
    at = 0
    for _ in range(0 if row.cells else _MAX_RULES):
        if (rule := _RULE.match(text, at)) is None:
            break
        at = rule.end()
        row.rules |= {rule[1]} if rule[1] else set()
    row.cells.append(text[at:])


def _header(rows: Sequence[_Row]) -> int:
    """Return the number of rows with text that are a header."""
    filled, rules = 0, list[tuple[int, set[str]]]()
    for row in rows:
        rules += [(filled, row.rules)] if row.rules else []
        filled += any(cell.strip() for cell in row.cells)
    for names in ({"endhead", "endfirsthead"}, {"midrule"}):
        if above := [number for number, kinds in rules if kinds & names and 0 < number < filled]:
            return above[0]
    lines = {number for number, kinds in rules if "hline" in kinds and 0 < number < filled}
    return lines.pop() if len(lines) == 1 else 0


def _cells(rows: Sequence[_Row], num_headers: int) -> Iterator[Cell]:
    """Yield the cells as they are written: below one that spans several rows, empty cells keep its place."""
    for number, row in enumerate(rows):
        column = 0
        for text in row.cells:
            down = across = 1
            for _ in range(2):
                if (span := _SPAN.match(text)) is None:
                    break
                count_end = closing_brace(text, span.end())
                count = text[span.end() + 1 : count_end].strip()
                rest = _after_argument(text, count_end + 1)
                size = min(int(count), _MAX_SPAN) if count.isdecimal() and len(count) < 4 else 1
                down, across = (max(size, 1), across) if span[1] == "row" else (down, max(size, 1))
                opening = text.find("{", rest)
                text = text[rest:] if opening < 0 else text[opening + 1 : closing_brace(text, opening)]
            yield Cell(number, column, latex_text(text), down, across, number < num_headers)
            column += across


def _with_spans(cells: Iterator[Cell]) -> Iterator[Cell]:
    """Yield cells without those that only keep the place of a cell that spans rows. One with text ends the span above it."""
    written = list(cells)
    last = max((cell.row for cell in written), default=0)
    by_row: dict[int, list[Cell]] = {}
    for cell in written:
        by_row.setdefault(cell.row, []).append(cell)
    covered = set[tuple[int, int]]()  # (row, column)
    for cell in written:
        if (cell.row, cell.column) in covered:
            continue
        columns = range(cell.column, cell.column + cell.column_span)
        down = 1
        while down < cell.row_span and cell.row + down <= last:
            below = _in_columns(by_row[cell.row + down], columns)
            if any(other.text or not {*_columns(other)} <= {*columns} for other in below):
                break
            covered |= {(other.row, other.column) for other in below}
            down += 1
        yield replace(cell, row_span=down)


def _columns(cell: Cell) -> range:
    return range(cell.column, cell.column + cell.column_span)


def _in_columns(row: Sequence[Cell], columns: range) -> Sequence[Cell]:
    """Return the cells of a row, in the order of their columns, that stand in some of these columns."""
    column = attrgetter("column")
    first = max(bisect_right(row, columns.start, key=column) - 1, 0)
    if row[first].column + row[first].column_span <= columns.start:
        first += 1
    return row[first : bisect_left(row, columns.stop, key=column)]


def latex_text(text: str) -> str:
    """Return the text of a cell or a caption without fonts, grouping braces and escapes. Formulas stay as they are."""
    parts = _MATH.split(text)
    for index in range(0, len(parts), 2):
        plain = re.sub(r"\\\\(?:\[[^\[\]]*\])?|(?<!\\)[~&]", " ", _FONT.sub("", _NESTED.sub(" ", parts[index])))
        parts[index] = _ESCAPED.sub(r"\1", re.sub(r"(?<!\\)[{}]", "", plain))
    return " ".join("".join(parts).split())
