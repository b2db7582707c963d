"""Lines with boxes to blocks: paragraphs, headings and list items."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from statistics import median

from ...mm.media.page_facts import Box, TextLine
from .blocks import Block, Kind, Source, union
from .confidence import CharScores, confidence_of, scored_line

HYPHEN = "\u00ad"
"""At the end of a line, of a word that goes on in the next one."""
_ITEM = re.compile(r"(?:[•▪◦‣·○●■–*-]|\(?(?:\d{1,3}|[a-z]|[ivx]{1,4})[.)])\s+\S")
_HEADING_LEVELS = ((1.7, 1), (1.35, 2), (1.12, 3))  # line height in heights of the text, and the level from there on
_MAX_HEADING = 200  # characters
_SPACING = 0.75  # line heights between two lines of one paragraph, at most
_INDENT = 1.0  # line heights by which the first line of a paragraph is indented, at least
_SAME_SIZE = 0.12  # relative difference of the heights of lines of one paragraph, at most
_ROOM = 0.5  # line heights that are left beside a word that would have had room
_COLUMN_CHARS = 20  # characters of a line that shows a column of text
_COLUMN_LINES = 3  # such lines of a column, at least
_COLUMN_SHARE = 0.6  # of the width of a page's text: wider lines stand above or below columns
_MIN_GAP = 0.9  # line heights between two columns, at least
_MAX_CUTS = 32  # of columns into columns

Span = tuple[float, float]
"""Left and right end of a column."""


def blocks_of(
    lines: Sequence[TextLine],
    scores: Sequence[CharScores],
    source: Source = "text_layer",
    model: str = "",
    body: float | None = None,
) -> tuple[Block, ...]:
    """Return the blocks of lines that stand in reading order.

    Args:
        scores: of the characters of each line.
        body: height of the page's text, if there are other lines.
    """
    if not lines:
        return ()
    body = body_size(lines) if body is None else body
    pairs = list(zip(lines, scores, strict=True))
    return tuple(_block(group, body, source, model) for group in _groups(pairs))


def reading_order(lines: Sequence[TextLine]) -> list[int]:
    """Return the indices of lines in reading order: pages are cut at gaps from top to bottom and from column to column.

    It is the recursive X-Y cut (Nagy and Seth, 1984): the widest gap across the whole region divides it; gaps between lines
    count only as rows if no gap between columns is there.
    """
    return list(_cut([line.box for line in lines], list(range(len(lines)))))


def text_order(lines: Sequence[TextLine]) -> list[int]:
    """Return the indices of a text layer's lines in reading order: that of the file, except on pages with columns of text.

    Tables have columns, too, whose lines are short; they are left in the order of the file.
    """
    return reading_order(lines) if column_spans(lines) else list(range(len(lines)))


def column_spans(lines: Sequence[TextLine]) -> list[Span]:
    """Return the left and right end of each column of running text; none on a page without columns."""
    long = [i for i, line in enumerate(lines) if len(line.text) >= _COLUMN_CHARS]
    if len(long) < 2 * _COLUMN_LINES:
        return []
    boxes = [line.box for line in lines]
    left, _, right, _ = union([boxes[i] for i in long])
    narrow = [i for i in long if boxes[i][2] - boxes[i][0] < _COLUMN_SHARE * (right - left)]
    if len(narrow) < 2 * _COLUMN_LINES:
        return []
    columns = _split(boxes, narrow, 0, _MIN_GAP * median(boxes[i][3] - boxes[i][1] for i in narrow))
    if len(columns) < 2 or min(map(len, columns)) < _COLUMN_LINES:
        return []
    return [(min(boxes[i][0] for i in column), max(boxes[i][2] for i in column)) for column in columns]


def _cut(boxes: Sequence[Box], indices: list[int]) -> Iterator[int]:
    waiting = [(indices, 0)]  # the next one last, with the number of columns around it
    while waiting:
        indices, depth = waiting.pop()
        if len(indices) < 2:
            yield from indices
            continue
        height = median(boxes[i][3] - boxes[i][1] for i in indices)
        columns = _split(boxes, indices, 0, _MIN_GAP * height)
        if len(columns) > 1 and min(map(len, columns)) > 1 and depth < _MAX_CUTS:
            waiting += [(column, depth + 1) for column in reversed(columns)]
            continue
        rows = _split(boxes, indices, 1, 0.0)
        if len(rows) > 1:
            yield from _rows(boxes, rows, height)
            continue
        yield from sorted(indices, key=lambda i: (boxes[i][0], boxes[i][1]) if len(columns) > 1 else (boxes[i][1], boxes[i][0]))


def _rows(boxes: Sequence[Box], rows: list[list[int]], height: float) -> Iterator[int]:
    """Yield the lines of rows. Neighbouring rows that are cut into the same columns are read column by column."""
    band, columns = list[int](), list[Span]()
    for row in rows:
        own = [(boxes[part[0]][0], max(boxes[i][2] for i in part)) for part in _split(boxes, row, 0, _MIN_GAP * height)]
        for span in own:
            _add_span(columns, span, _MIN_GAP * height)
        if band and (len(columns) < 2 or len(own) < 2):
            yield from _band(boxes, band, height)
            band, columns = [], own
        band += row
    yield from _band(boxes, band, height)


def _add_span(spans: list[Span], span: Span, gap: float) -> None:
    """Add a span to those of columns, from left to right. Columns without a wider gap between them become one."""
    left, right = span
    first = bisect_left(spans, -gap, key=lambda other: other[1] - left)
    last = bisect_right(spans, gap, key=lambda other: other[0] - right)
    if first < last:
        left, right = min(left, spans[first][0]), max(right, spans[last - 1][1])
    spans[first:last] = [(left, right)]


def _band(boxes: Sequence[Box], band: list[int], height: float) -> Iterator[int]:
    for column in _split(boxes, band, 0, _MIN_GAP * height):
        yield from sorted(column, key=lambda i: (boxes[i][1], boxes[i][0]))


def _split(boxes: Sequence[Box], indices: list[int], axis: int, gap: float) -> list[list[int]]:
    """Return groups of boxes with gaps wider than `gap` between them along an axis, 0 across and 1 down."""
    groups, end = list[list[int]](), float("-inf")
    for i in sorted(indices, key=lambda i: boxes[i][axis]):
        if not groups or boxes[i][axis] - end > gap:
            groups.append([])
        groups[-1].append(i)
        end = max(end, boxes[i][axis + 2])
    return groups


def body_size(lines: Sequence[TextLine]) -> float:
    """Return the height in points of the lines that hold most of the text."""
    characters = dict[float, int]()
    for line in lines:
        size = round(line.size, 1)
        characters[size] = characters.get(size, 0) + len(line.text)
    return max(characters, key=lambda size: (characters[size], -size)) or 1.0


_Pair = tuple[TextLine, CharScores]


def _groups(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Yield the lines of each block."""
    group, margin = [pairs[0]], pairs[0][0].box[2]  # `margin`: the right end of its longest line
    for pair in pairs[1:]:
        if _continues(group, pair[0], margin):
            group.append(pair)
            margin = max(margin, pair[0].box[2])
        else:
            yield group
            group, margin = [pair], pair[0].box[2]
    yield group


def _continues(group: Sequence[_Pair], line: TextLine, margin: float) -> bool:
    """Return whether a line belongs to the block of the lines before."""
    first, last = group[0][0], group[-1][0]
    size = max(last.size, line.size)
    if abs(last.size - line.size) > _SAME_SIZE * size or _ITEM.match(line.text):
        return False
    gap = line.box[1] - last.box[3]
    overlap = min(line.box[2], last.box[2]) - max(line.box[0], last.box[0])
    if not -0.6 * size <= gap <= _SPACING * size or overlap <= 0:
        return False
    if not last.text.endswith((HYPHEN, "-")) and _fits_before(last, line, margin):
        return False
    is_item, left = bool(_ITEM.match(first.text)), group[1][0].box[0] if len(group) > 1 else first.box[0]
    return is_item or line.box[0] - left < _INDENT * size


def _fits_before(last: TextLine, line: TextLine, margin: float) -> bool:
    """Return whether the first word of a line would have had room at the end of the line before: then the break is meant."""
    width = (line.box[2] - line.box[0]) * (len(line.text.split(" ", 1)[0]) + 1) / len(line.text)
    return last.box[2] + width < max(margin, line.box[2]) - _ROOM * line.size


def _block(group: Sequence[_Pair], body: float, source: Source, model: str) -> Block:
    lines = [line for line, _ in group]
    text, size = join_lines([line.text for line in lines]), median(line.size for line in lines)
    level = next((level for least, level in _HEADING_LEVELS if size >= least * body), 0) if len(text) <= _MAX_HEADING else 0
    is_item = not level and _ITEM.match(text) is not None
    kind: Kind = "heading" if level else "list_item" if is_item else "paragraph"
    shown = tuple(scored_line(line.text.replace(HYPHEN, "-"), line.box, chars) for line, chars in group)
    return Block(
        kind=kind,
        text=text,
        box=union([line.box for line in lines]),
        lines=shown,
        level=level,
        confidence=confidence_of(shown),
        source=source,
        model=model,
    )


def join_lines(lines: Sequence[str]) -> str:
    """Return the text of lines. A word that is hyphenated at the end of a line becomes whole again."""
    parts, end = list[str](), ""  # `end`: the last two characters
    for line in lines:
        if end.endswith(HYPHEN):
            parts[-1], end = parts[-1][:-1], end[:-1]
            part = line if line[:1].islower() else f"-{line}"
        elif end.endswith("-") and end[:-1].isalpha() and line[:1].isalpha():
            part = line
        else:
            part = f" {line}" if end else line
        if part:
            parts.append(part)
            end = (end + part)[-2:]
    return "".join(parts).replace(HYPHEN, "-")
