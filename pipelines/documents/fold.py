"""Finds headers, footers and page numbers, and joins paragraphs and tables that go on over a page, by comparing pages."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .blocks import HYPHENATED, Block, Kind, Line, PageRecord, body_of, num_columns, repeated_rows, union
from .confidence import confidence_of

_EDGE = 0.15  # share of the page's height at the top and at the bottom where headers and footers stand
_LINES = 3  # of each edge, at most
_NEAR = 4  # pages between two with the same header, at most, as with headers of even pages in short chapters
_LEAST = 3  # pages with the same header
_COLUMN = 3  # lines that show how wide a column of text is
_LONG = 40  # characters of a paragraph without boxes that may go on
_SAME_PLACE = 0.015  # share of the page's height by which it may move
_LOW = 0.5  # share of the page's height below which a table that goes on ends; the next one begins above
_SAME_SIDE = 0.015  # share of the page's width by which its left side may move
_NEAR_SIDE = 0.1  # the same of its right side, where the text may be ragged
_NUMBER = re.compile(r"\d{1,6}")
_END = re.compile(r"[.!?:;…。！？][\"'”’»)\]]*$")  # of a paragraph

_Key = tuple[bool, str, int]


@dataclass(frozen=True)
class _Edge:
    """A line near an edge of a page.

    Args:
        pattern: its text without numbers. place: of its middle, in heights of the page.
        is_heading: it is larger than the text, as the number of a chapter is, which counts, too.
    """

    page: int
    is_top: bool
    pattern: str
    numbers: tuple[int, ...]
    place: float
    is_heading: bool

    @property
    def key(self) -> _Key:
        """Lines with equal keys may be the same; a text may have "#" where another one has a number."""
        return self.is_top, self.pattern, len(self.numbers)


def folded(records: Callable[[], Iterable[PageRecord]]) -> Iterator[PageRecord]:
    """Yield the pages of a document with their headers, footers and page numbers, and with paragraphs that go on.

    A line near the edge of a page is a header or footer if pages nearby have the same one at the same place; numbers in it may
    count with the pages. Only lines with boxes are looked at.

    Args:
        records: returns the pages in order; it is called twice, and the lines at the edges of all pages are held.
    """
    groups = defaultdict[_Key, list[_Edge]](list)
    for page in records():
        for _, edge in _edges(page):
            groups[edge.key].append(edge)
    before: PageRecord | None = None
    for page in records():
        page = _mark_furniture(page, groups)
        yield (page := _mark_continued(page, before))
        before = page


def _edges(page: PageRecord) -> Iterator[tuple[Line, _Edge]]:
    """Yield the lines at the top and at the bottom of a page, the outermost first."""
    blocks = [block for block in page.blocks if block.kind != "table"]  # whose first lines are repeated on each page, too
    lines = [(line, line.box, block.kind) for block in blocks for line in block.lines if line.box is not None]
    for is_top in (True, False):
        outermost = sorted(lines, key=lambda entry: entry[1][1] if is_top else -entry[1][3])
        for line, box, kind in outermost[:_LINES]:
            place = (box[1] + box[3]) / 2 / max(page.height, 1.0)
            if place < _EDGE if is_top else place > 1 - _EDGE:
                numbers = tuple(map(int, _NUMBER.findall(line.text)))
                yield line, _Edge(page.number, is_top, _NUMBER.sub("#", line.text), numbers, place, kind == "heading")


def _is_repeated(edge: _Edge, group: Sequence[_Edge]) -> bool:
    """Return whether enough pages nearby have the same line. `group`: lines of its key, in the order of pages."""
    far = _NEAR * (_LEAST - 1)  # others do not matter
    start = bisect_left(group, edge.page - far, key=lambda other: other.page)
    end = bisect_right(group, edge.page + far, key=lambda other: other.page)
    pages = {other.page for other in group[start:end] if _is_same(edge, other)}
    first = last = edge.page
    for page in sorted(pages):
        last = page if last < page <= last + _NEAR else last
    for page in sorted(pages, reverse=True):
        first = page if first - _NEAR <= page < first else first
    return len([page for page in pages if first <= page <= last]) >= _LEAST


def _is_same(edge: _Edge, other: _Edge) -> bool:
    """Return whether two lines of one key stand at the same place, with equal numbers or such as count the pages."""
    if abs(edge.place - other.place) > _SAME_PLACE:
        return False
    distance = other.page - edge.page
    steps = [theirs - ours for ours, theirs in zip(edge.numbers, other.numbers, strict=True)]
    if edge.pattern.strip(" #-–—|.()[]/") == "" and distance:  # nothing but numbers: one of them counts
        return distance in steps and all(step in (0, distance) for step in steps)
    return all(step == 0 or (step == distance and not edge.is_heading) for step in steps)


def _mark_furniture(page: PageRecord, groups: dict[_Key, list[_Edge]]) -> PageRecord:
    kinds = dict[int, Kind]()  # by identity of the line
    for line, edge in _edges(page):
        if _is_repeated(edge, groups[edge.key]):
            kinds[id(line)] = "page_header" if edge.is_top else "page_footer"
    if not kinds:
        return page
    return replace(page, blocks=tuple(part for block in page.blocks for part in _divided(block, kinds)))


def _divided(block: Block, kinds: dict[int, Kind]) -> Iterator[Block]:
    """Yield the lines of a block that are headers or footers as blocks of their own, before or after the others."""
    found = [kinds.get(id(line)) for line in block.lines]
    if not any(found):
        yield block
        return
    start = next((i for i, kind in enumerate(found) if kind is None), len(found))
    end = next((i for i in range(len(found), start, -1) if found[i - 1] is None), start)
    for i in range(start):
        yield _single(block, block.lines[i], found[i])
    text = block.text
    for line in block.lines[:start]:
        text = text.removeprefix(line.text).lstrip()
    for line in reversed(block.lines[end:]):
        text = text.removesuffix(line.text).rstrip()
    if start < end:
        lines = block.lines[start:end]
        boxes = [line.box for line in lines if line.box is not None]
        yield replace(block, text=text, lines=lines, box=union(boxes), confidence=confidence_of(lines))
    for i in range(end, len(found)):
        yield _single(block, block.lines[i], found[i])


def _single(block: Block, line: Line, kind: Kind | None) -> Block:
    assert kind is not None
    return replace(block, kind=kind, text=line.text, box=line.box, lines=(line,), level=0, confidence=line.confidence)


def _mark_continued(page: PageRecord, before: PageRecord | None) -> PageRecord:
    """Return a page whose first paragraph or table is marked if it goes on from the page before."""
    if before is None or before.number + 1 != page.number or not (body := body_of(page)) or not body_of(before):
        return page
    last, first = before.blocks[body_of(before)[-1]], page.blocks[body[0]]
    if last.kind != first.kind or last.source != first.source:
        return page
    is_text = last.kind == "paragraph" and first.text[:1].islower() and _is_open(last, first, before)
    if not is_text and not (last.kind == "table" and _is_same_table(last, first, before, page)):
        return page
    blocks = list(page.blocks)
    blocks[body[0]] = replace(first, continues=True)
    return replace(page, blocks=tuple(blocks))


def _is_same_table(last: Block, first: Block, before: PageRecord, page: PageRecord) -> bool:
    """Return whether the first table of a page has the header of the last one before again, or stands in its columns."""
    if not last.cells or not first.cells or num_columns(last.cells) != num_columns(first.cells):
        return False
    if repeated_rows(last.cells, first.cells):
        return True
    if last.box is None or first.box is None or any(cell.header for cell in first.cells):
        return False
    is_at_ends = last.box[3] > _LOW * before.height and first.box[1] < (1 - _LOW) * page.height
    is_left = abs(last.box[0] - first.box[0]) < _SAME_SIDE * page.width
    return is_at_ends and is_left and abs(last.box[2] - first.box[2]) < _NEAR_SIDE * page.width


def _is_open(last: Block, first: Block, page: PageRecord) -> bool:
    """Return whether the last paragraph of a page may go on: it has no end, and its last line had no room for the next word."""
    if _END.search(last.text):
        return False
    if HYPHENATED.search(last.text):
        return True
    boxes = [line.box for index in body_of(page) for line in page.blocks[index].lines if line.box is not None]
    line = last.lines[-1] if last.lines else None
    if line is None or line.box is None:
        return len(last.text) >= _LONG
    column = [box for box in boxes if box[0] < line.box[2] and box[2] > line.box[0]]
    word = (line.box[2] - line.box[0]) * (len(first.text.split(" ", 1)[0]) + 1) / len(line.text)
    return len(column) >= _COLUMN and line.box[2] + word > max(box[2] for box in column)
