"""Tables among lines with boxes: those of ruled grids, and those whose columns are aligned."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from ...engine.elements import Cell
from ...mm.media.page_facts import Box, TextLine
from ...mm.media.page_rules import Rule
from .blocks import union
from .grids import Grid, find_grids
from .text_blocks import Span, join_lines

_GAP = 0.6  # line heights between two columns, at least
_ROW_GAP = 1.8  # line heights between two rows, at most
_MAX_COLUMNS = 64  # of a table, and of running text; what stands beside them is no part of a table
_MAX_TRIES = 8  # grids in which a line is looked at; boxes of more overlap in drawings only
_LEAST_ROWS = 3  # of a table whose columns are only aligned
_NEAR_ROWS = 8  # before a line that may belong to a table
_APART = 0.3  # share of the lines in a grid that have several parts in one cell, at most
_MAX_SINGLE = 3  # rows in a table, one after the other, that have text in one column
_CROSSED = 4  # one row in so many may have a cell that crosses a gap between columns
_FILLED = 0.6  # share of the columns of a row that have text, on average
_FILLED_COLUMN = 0.3  # share of the rows in which a column has text, at least
_PROSE = 22  # characters of a cell, on average, from which a column may be one of text
_TIGHT = 0.4  # line heights between two lines of one row, at most
_MAX_RULES = 1000  # in and beside rows; more are a drawing
_HEADER_ROWS = 3  # above the rule under a table's header, at most
_MARKER = re.compile(r"[•▪◦‣·○●■–—*-]|\(?(?:\d{1,3}|[a-z]|[ivx]{1,4})[.)]|\[\d{1,3}\]|(?:\d{1,2}\.)+\d{0,2}")
_LEADERS = re.compile(r"(?:\. ?){5}|…{2}")  # from an entry to its page
_LED = 0.3  # share of the rows with leaders, from which they are no table
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True)
class CellText:
    """A line of text, or the part of one that stands in a cell.

    `line`: index of the line. `first`: number of characters of the line before this part, without spaces.
    """

    text: str
    box: Box
    size: float
    line: int
    first: int = 0

    @property
    def middle(self) -> float:
        """From top to bottom."""
        return (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True)
class TextTable:
    """A table with its cells, and the pieces of lines in them in reading order."""

    cells: tuple[Cell, ...]
    pieces: tuple[CellText, ...]
    box: Box

    @property
    def lines(self) -> set[int]:
        """Indices of the lines that are in the table."""
        return {piece.line for piece in self.pieces}


_Row = list[CellText]
"""Pieces side by side, from left to right."""
_Numbered = tuple[int, TextLine]
"""A line with its index."""


def find_tables(lines: Sequence[TextLine], rules: Sequence[Rule] = (), columns: Sequence[Span] = ()) -> list[TextTable]:
    """Return the tables of a page, from top to bottom.

    Args:
        lines: of the page, in any order.
        rules: its horizontal and vertical lines.
        columns: the left and right end of each column of running text; a table without vertical rules is in one of them.

    Lines inside of a grid of rules are cells if several of them have text. Other lines are, if at least three rows have the
    same gaps between columns, and the columns are not columns of running text. A line belongs to one table as a whole.
    """
    tables, taken = list[TextTable](), set[int]()
    boxes, tries = np.array([line.box for line in lines]).reshape(-1, 4), np.zeros(len(lines), np.int64)
    for grid in find_grids(rules):
        inside = np.flatnonzero(grid.holds(boxes) & (tries < _MAX_TRIES))
        tries[inside] += 1
        if (table := _ruled_table(grid, [(i, lines[i]) for i in inside.tolist()])) is not None:
            tables.append(table)
            taken |= table.lines
            tries[list(table.lines)] = _MAX_TRIES
    rest = [(i, line) for i, line in enumerate(lines) if i not in taken]
    horizontals = sorted((rule for rule in rules if rule[1] == rule[3]), key=_height)
    for region in _by_column(rest, columns):
        for block in _row_blocks(region):
            if (aligned := _aligned_table(block, horizontals)) is not None:
                tables.append(aligned)
    return sorted(tables, key=lambda table: (table.box[1], table.box[0]))


def _by_column(lines: Sequence[_Numbered], columns: Sequence[Span]) -> list[list[_Numbered]]:
    """Return the lines of each column of running text; those over several columns are left out."""
    if not 0 < len(columns) <= _MAX_COLUMNS:
        return [list(lines)]
    starts = [left - 1 for left, _ in columns[1:]]
    parts: list[list[_Numbered]] = [[] for _ in columns]
    for pair in lines:
        first, last = bisect_right(starts, pair[1].box[0]), bisect_right(starts, pair[1].box[2])
        if first == last:
            parts[first].append(pair)
    return parts


def _pieces(index: int, line: TextLine, places: Sequence[float] | None = None) -> Iterator[CellText]:
    """Yield the parts of a line between its cuts; `places`: only cuts at these places, which are in order, count."""
    start, left, first = 0, line.box[0], 0
    for cut in line.cuts:
        if places is None or bisect_left(places, cut.left - 1) < bisect_right(places, cut.right + 1):
            text = line.text[start : cut.position].strip()
            yield CellText(text, (left, line.box[1], cut.left, line.box[3]), line.size, index, first)
            start, left, first = cut.position, cut.right, first + sum(map(len, text.split()))
    yield CellText(line.text[start:].strip(), (left, line.box[1], line.box[2], line.box[3]), line.size, index, first)


def _ruled_table(grid: Grid, lines: Sequence[_Numbered]) -> TextTable | None:
    """Return the table of a grid of rules, or None if it is a frame, a drawing or an empty form."""
    texts: dict[tuple[int, int], list[CellText]] = {}
    apart = [len(list(_pieces(index, line))) > len(list(_pieces(index, line, grid.xs))) for index, line in lines]
    if apart.count(True) > _APART * len(lines):  # columns without rules between them
        return None
    for index, line in lines:
        for piece in _pieces(index, line, grid.xs):
            texts.setdefault(grid.cell_at((piece.box[0] + piece.box[2]) / 2, piece.middle), []).append(piece)
    spans = grid.spans
    if len(texts) < 2 or len({column for _, column in texts}) < 2 or 3 * len(texts) < len(spans):
        return None
    cells, row = list[Cell](), 0
    by_row = defaultdict[int, dict[int, tuple[int, int]]](dict)
    for (number, column), span in spans.items():
        by_row[number][column] = span
    for number in range(len(grid.ys) - 1):
        own = by_row[number]
        parts = {column: _reading(texts.get((number, column), [])) for column in own}
        split = _split_row(parts) if all(rows == 1 for rows, _ in own.values()) else [parts]
        for part in split:
            for column, (rows, columns) in sorted(own.items()):
                cells.append(Cell(row, column, _text(_reading(part.get(column, []))), rows, columns))
            row += 1
    pieces = tuple(piece for key in sorted(texts) for piece in _reading(texts[key]))
    return TextTable(_with_header(cells, None), pieces, grid.box)


def _split_row(parts: dict[int, list[CellText]]) -> list[dict[int, list[CellText]]]:
    """Return the rows of a row of a grid: several, where rules stand around the rows only, and each line is one."""
    filled = [column for column, pieces in parts.items() if pieces]
    rows = _rows([piece for pieces in parts.values() for piece in pieces])
    counts = {len(parts[column]) for column in filled}
    is_full = len(filled) > 1 and counts == {len(rows)} and len(rows) > 1
    mean = sum(len(piece.text) for row in rows for piece in row) / max(sum(map(len, rows)), 1)
    if not is_full or mean >= _PROSE:
        return [parts]
    return [{column: [parts[column][number]] for column in filled} for number in range(len(rows))]


def _reading(pieces: Sequence[CellText]) -> list[CellText]:
    return [piece for row in _rows(pieces) for piece in row]


def _text(pieces: Sequence[CellText]) -> str:
    return join_lines([piece.text for piece in pieces])


def _rows(pieces: Sequence[CellText]) -> list[_Row]:
    """Return pieces that stand side by side, row by row."""
    rows, top, bottom = list[_Row](), 0.0, 0.0
    for piece in sorted(pieces, key=lambda piece: (piece.middle, piece.box[0])):
        if not rows or piece.middle > bottom or piece.box[1] >= bottom:
            rows.append([])
            top, bottom = piece.box[1], piece.box[3]
        if not top <= piece.middle <= bottom:
            rows.append([])
        rows[-1].append(piece)
        bottom = min(bottom, piece.box[3])
    return [sorted(row, key=lambda piece: piece.box[0]) for row in rows]


def _row_blocks(lines: Sequence[_Numbered]) -> Iterator[list[_Row]]:
    """Yield rows that may be a table: they begin and end with rows of several pieces, and stand near each other."""
    pieces = [piece for index, line in lines for piece in _pieces(index, line)]
    block, waiting = list[_Row](), list[_Row]()  # `waiting`: rows of one piece after the block
    gaps = list[Span]()  # between the columns of the block
    for row in (row[:_MAX_COLUMNS] for row in _rows(pieces)):
        before = (waiting or block or [row])[-1]
        size = max(piece.size for piece in (*row, *before))
        free = gaps
        for other in (*waiting, row) if len(row) > 1 else ():
            free = _free_gaps(free, other, _GAP * size)
        inner = _inner_gaps(row)
        is_apart = len(row) > 1 and not any(min(a[1], b[1]) > max(a[0], b[0]) for a in free for b in inner)
        if block and (_gap(before, row) > _ROW_GAP * size or len(waiting) > _MAX_SINGLE or is_apart or _is_prose(row, block)):
            yield [*block, *_last_lines(block[-1], waiting)]
            block, waiting, free = [], [], inner
        if len(row) > 1:
            gaps = free if block else inner
            block += [*waiting, row]
            waiting = []
        elif block:
            waiting.append(row)
    if block:
        yield [*block, *_last_lines(block[-1], waiting)]


def _last_lines(row: _Row, waiting: Sequence[_Row]) -> Iterator[_Row]:
    """Yield the lines below the last row of a block that go on with a cell beside the first column."""
    before = row
    for line in waiting:
        if line[0].box[0] < row[0].box[2] or _gap(before, line) > _TIGHT * line[0].size:
            return
        yield line
        before = line


def _inner_gaps(row: _Row) -> list[Span]:
    """Return the gaps between the pieces of a row."""
    return [(piece.box[2], after.box[0]) for piece, after in pairwise(row)]


def _free_gaps(gaps: Sequence[Span], row: _Row, least: float) -> list[Span]:
    """Return what a row leaves free of gaps between columns, where that is wide enough."""
    free = list[Span]()
    for left, right in gaps:
        for piece in row:
            if piece.box[0] < right and piece.box[2] > left:
                free += [(left, piece.box[0])] if piece.box[0] - left >= least else []
                left = max(left, piece.box[2])
        free += [(left, right)] if right - left >= least else []
    return free


def _is_prose(row: _Row, block: Sequence[_Row]) -> bool:
    """Return whether a row is one line over several columns of most of the rows before."""
    (left, _, right, _), wide = row[0].box, [other for other in block[-_NEAR_ROWS:] if len(other) > 1]
    crossed = [sum(min(right, piece.box[2]) > max(left, piece.box[0]) for piece in other) > 1 for other in wide]
    return len(row) == 1 and crossed.count(True) * 2 > len(wide)


def _aligned_table(block: Sequence[_Row], horizontals: Sequence[Rule]) -> TextTable | None:
    """Return the table of rows whose columns are aligned, or None if they are something else. `horizontals`: by height."""
    wide = [row for row in block if len(row) > 1]
    box = union([piece.box for row in block for piece in row])
    margin = (box[3] - box[1]) / 2
    near = _between(horizontals, box[1] - margin, box[3] + margin)
    lines = [rule for rule in near if _is_as_wide(rule, box)] if len(near) <= _MAX_RULES else []
    if len(wide) < (_LEAST_ROWS if len(lines) < 2 else 2):
        return None
    columns = _columns(block, _GAP * median(piece.size for row in wide for piece in row))
    if len(columns) < 2:
        return None
    rows = _logical_rows(block, columns, lines)
    if not _is_table(rows, len(columns)) or (not lines and _is_index(rows, columns)):
        return None
    cells = list[Cell]()
    for number, row in enumerate(rows):
        for (first, last), pieces in sorted(row.items()):
            cells.append(Cell(number, first, _text(pieces), 1, last - first + 1))
    parts = tuple(piece for row in rows for _, pieces in sorted(row.items()) for piece in pieces)
    return TextTable(_with_header(_with_empty(cells, len(columns)), _header_rows(rows, lines)), parts, box)


def _height(rule: Rule) -> float:
    return rule[1]


def _between(horizontals: Sequence[Rule], top: float, bottom: float) -> Sequence[Rule]:
    """Return the rules between two heights. `horizontals`: by height."""
    return horizontals[bisect_right(horizontals, top, key=_height) : bisect_left(horizontals, bottom, key=_height)]


def _is_as_wide(rule: Rule, box: Box) -> bool:
    """Return whether a horizontal rule is about as wide as a box, and stands above, in or below it."""
    width, covered = box[2] - box[0], min(rule[2], box[2]) - max(rule[0], box[0])
    return covered > 0.8 * width and rule[2] - rule[0] < 1.4 * width


def _columns(rows: Sequence[_Row], gap: float) -> list[Span]:
    """Return the left and right end of each column: few rows have text between two columns."""
    ends = sorted((side, step) for row in rows for piece in row for side, step in ((piece.box[0], 1), (piece.box[2], -1)))
    allowed, columns, depth = len(rows) // _CROSSED, list[Span](), 0
    for place, step in ends:
        if depth <= allowed < depth + step and (not columns or place - columns[-1][1] >= gap):
            columns.append((place, place))
        depth += step
        if columns and depth + (step < 0) > allowed:
            columns[-1] = (columns[-1][0], max(place, columns[-1][1]))
    return columns


_Cells = dict[tuple[int, int], list[CellText]]
"""The pieces of a row by their first and last column."""


def _logical_rows(block: Sequence[_Row], columns: Sequence[Span], lines: Sequence[Rule]) -> list[_Cells]:
    """Return the rows of a table. Lines of one row stand close to each other, or have no text in the first column."""
    middles = [(columns[i][1] + columns[i + 1][0]) / 2 for i in range(len(columns) - 1)]
    rows, bottom = list[_Cells](), 0.0
    gaps = [_gap(above, below) for above, below in pairwise(block)]
    size = median(piece.size for row in block for piece in row)
    tight = min(gaps, default=0.0) + _TIGHT * size  # rows stand farther from each other than lines, if some gaps are wider
    is_spaced = sum(gap > tight for gap in gaps) >= max(2, len(gaps) // 4)
    for row in block:
        cells: _Cells = {}
        for piece in row:
            first, last = bisect_right(middles, piece.box[0]), bisect_right(middles, piece.box[2])
            first, last = (first, last) if first < last and len(row) < len(columns) else (_column(piece, columns),) * 2
            cells.setdefault((first, last), []).append(piece)
        top = min(piece.box[1] for piece in row)
        is_ruled = bool(_between(lines, bottom - 2, top + 2))
        if (
            rows
            and not is_ruled
            and _continues(rows[-1], cells, len(columns), top - bottom, tight if is_spaced else None, size)
        ):
            for key, pieces in cells.items():
                rows[-1].setdefault(_spanning(rows[-1], key), []).extend(pieces)
        else:
            rows.append(cells)
        bottom = max(piece.box[3] for piece in row)
    return rows


def _gap(above: _Row, below: _Row) -> float:
    return min(piece.box[1] for piece in below) - max(piece.box[3] for piece in above)


def _column(piece: CellText, columns: Sequence[Span]) -> int:
    """Return the column that a piece shares most of its width with."""
    overlaps = [min(piece.box[2], right) - max(piece.box[0], left) for left, right in columns]
    return overlaps.index(max(overlaps))


def _spanning(row: _Cells, key: tuple[int, int]) -> tuple[int, int]:
    """Return the cell of a row that a column belongs to."""
    return next((other for other in row if other[0] <= key[0] and key[1] <= other[1]), key)


def _continues(row: _Cells, cells: _Cells, count: int, gap: float, tight: float | None, size: float) -> bool:
    """Return whether a line goes on with the cells of the row above. `tight`: largest gap in a row, if rows are less close."""
    inside = [any(other[0] <= key[0] and key[1] <= other[1] for other in row) for key in cells]
    if tight is not None:
        apart = [all(key[1] < other[0] or other[1] < key[0] for other in row) for key in cells]
        is_new = len(cells) == count and any(first == 0 for first, _ in row)
        return gap <= tight and not is_new and all(map(max, inside, apart))
    is_first_empty = all(first > 0 for first, _ in cells)
    return is_first_empty and len(cells) < max(count - 1, 2) and gap < _TIGHT * size and all(inside)


def _is_table(rows: Sequence[_Cells], count: int) -> bool:
    """Return whether rows are a table: not a list, and not columns of running text."""
    wide = [row for row in rows if len(row) > 1]
    if len(wide) < 2 or sum(map(len, wide)) < _FILLED * count * len(wide):
        return False
    columns = [[pieces for row in rows for (first, _), pieces in row.items() if first == column] for column in range(count)]
    if any(len(column) < _FILLED_COLUMN * len(wide) for column in columns):
        return False
    texts = [[piece.text for pieces in column for piece in pieces] for column in columns]
    if count == 2 and _are_markers(texts[0]):
        return False
    prose = [sum(map(len, column)) / len(column) >= _PROSE for column in texts]
    return prose.count(True) < 2


def _is_index(rows: Sequence[_Cells], columns: Sequence[Span]) -> bool:
    """Return whether rows are a list of contents, numbered lines, or running text with notes beside it."""
    texts = [[piece.text for pieces in row.values() for piece in pieces] for row in rows]
    if sum(_LEADERS.search(text) is not None for row in texts for text in row) > _LED * len(rows):
        return True
    numbers = [int(row[0]) if row[0].isdecimal() and len(row[0]) < 6 else -1 for row in texts]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and (numbers[0] > 1 or len(columns) == 2):
        return True
    for number, (_, right) in enumerate(columns):
        pieces = [piece for row in rows for piece in row.get((number, number), [])][:-1]
        filled = [right - piece.box[2] < piece.size for piece in pieces]
        if sum(len(piece.text) >= _PROSE for piece in pieces) * 2 > len(rows) and sum(filled) > _FILLED * len(filled):
            return True
    return False


def _are_markers(texts: Sequence[str]) -> bool:
    """Return whether the texts of a column are bullets or numbers of a list."""
    return sum(_MARKER.fullmatch(text) is not None for text in texts) * 2 > len(texts)


def _header_rows(rows: Sequence[_Cells], lines: Sequence[Rule]) -> int | None:
    """Return the number of rows above the first rule inside of a table; None if there is no such rule."""
    for number in range(1, min(_HEADER_ROWS + 1, len(rows))):
        above = max(piece.box[3] for pieces in rows[number - 1].values() for piece in pieces)
        below = min(piece.box[1] for pieces in rows[number].values() for piece in pieces)
        if _between(lines, above - 3, below + 3):
            return number
    return None


def _with_empty(cells: Sequence[Cell], count: int) -> list[Cell]:
    """Return the cells of a table, with those that have no text."""
    covered = {(cell.row, cell.column + i) for cell in cells for i in range(cell.column_span)}
    places = ((row, column) for row in range(cells[-1].row + 1) for column in range(count))
    empty = [Cell(row, column, "") for row, column in places if (row, column) not in covered]
    return sorted((*cells, *empty), key=lambda cell: (cell.row, cell.column))


def _with_header(cells: Sequence[Cell], rows: int | None) -> tuple[Cell, ...]:
    """Return cells whose first rows are marked as a header. `rows`: None if it is to be told from the texts.

    The first row is one if all of its cells have text without numbers, and there are numbers below.
    """
    if rows is None:
        first = [cell.text for cell in cells if cell.row == 0]
        has_numbers = any(_DIGIT.search(cell.text) for cell in cells if cell.row > 0)
        rows = int(all(text and not _DIGIT.search(text) for text in first) and has_numbers)
    return tuple(replace(cell, header=cell.row < rows) for cell in cells)
