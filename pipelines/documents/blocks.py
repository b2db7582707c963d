"""The document tree: a document has pages, a page has blocks, a block has lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...callers.errors import ErrorInfo
from ...engine.elements import Cell
from ...mm.media.page_facts import Box

Kind = Literal[
    "heading", "paragraph", "list_item", "table", "formula", "code", "picture", "caption", "footnote", "page_header",
    "page_footer", "page",
]  # fmt: skip
"""Kinds of blocks. "page" is the text of a whole page that cannot be divided."""
FURNITURE: tuple[Kind, ...] = ("page_header", "page_footer")
"""Kinds that Markdown, text and HTML leave out."""
HYPHENATED = re.compile(r"[^\W\d_]-$")
"""The end of a text whose last word goes on."""
MAX_JOINED = 256
"""Pages over which a paragraph or table goes on in one piece."""
Source = Literal["text_layer", "reader", "model"]
ConfidenceKind = Literal["calibrated", "token_probability", "reader_score"]
"""Kind of a confidence: the expected share of right words, the mean probability of the words' tokens, or a reader's score."""
Way = Literal["blank", "text_layer", "draft", "reading", "unread"]
"""How a page is read. "blank": not at all, because it shows nothing. "text_layer": from the file. "draft": by a model, with the
text layer as its draft. "reading": by a model or another reader. "unread": nothing can read it."""


@dataclass(frozen=True)
class Line:
    """A line of a block.

    Args:
        confidence: mean of `word_confidences`, None if the source gives none.
        word_confidences: of each word (`text.split()`), from 0 to 1: the probability that it is right; () if the source gives
            none.
    """

    text: str
    box: Box | None = None
    confidence: float | None = None
    word_confidences: tuple[float, ...] = ()


@dataclass(frozen=True)
class Block:
    """A part of a page. Blocks stand in reading order.

    Args:
        text: without line ends, except in tables (a line for each row, a tab between cells), formulas (LaTeX), code, and whole
            pages.
        text_format: "markdown" if the text has inline markup, as models write it.
        box: in points from the top left corner of the page; None if the source gives no boxes.
        level: of a heading, or of an item in a list of a model, from 1.
        cells: of a table.
        continues: the paragraph or table began on the page before.
        confidence: mean confidence of its words, from 0 to 1; None if the source gives none.
        model: name of the model or reader; "" for the text layer.
        word_confidences: of each word (`text.split()`) that a model has written; None for a word that the answer writes in
            another way. () if there are none, or if the lines have them.
        is_calibrated: confidences are the expected share of right words, in place of the scores of the source.
    """

    kind: Kind
    text: str
    box: Box | None = None
    lines: tuple[Line, ...] = ()
    level: int = 0
    confidence: float | None = None
    source: Source = "text_layer"
    model: str = ""
    text_format: Literal["plain", "markdown"] = "plain"
    cells: tuple[Cell, ...] = ()
    continues: bool = False
    word_confidences: tuple[float | None, ...] = ()
    is_calibrated: bool = False

    @property
    def confidence_kind(self) -> ConfidenceKind | None:
        """Kind of `confidence`; None if there is none."""
        if self.confidence is None:
            return None
        if self.is_calibrated:
            return "calibrated"
        return "token_probability" if self.source == "model" else "reader_score"


@dataclass(frozen=True)
class NumberCheck:
    """The numbers of a page's text layer beside those of its reading, without separators.

    Args:
        agreed: how many both have. only_text_layer, only_reading: the others of each, at most 50, sorted.
    """

    agreed: int
    only_text_layer: tuple[str, ...] = ()
    only_reading: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageRecord:
    """The outcome of one page.

    Args:
        number: of the page in its document, from 1.
        width, height: in points as the page is shown; of a picture in pixels.
        scale: pixels per point of the rendered page; 1 for a picture.
        way: how it was read, and `reason` why in this way.
        error: why there is no text; None if it was read, or is blank.
        doubt: why the text is probably wrong; None if nothing speaks against it.
        numbers: of the text layer and of the reading, if the page has both.
        confidence: mean confidence of its words, see Block; None if the source gives none.
    """

    number: int
    width: float = 0.0
    height: float = 0.0
    scale: float = 1.0
    way: Way = "unread"
    reason: str = ""
    blocks: tuple[Block, ...] = ()
    error: ErrorInfo | None = None
    doubt: str | None = None
    numbers: NumberCheck | None = None
    confidence: float | None = None

    @property
    def confidence_kind(self) -> ConfidenceKind | None:
        """Kind of `confidence`; None if there is none."""
        return next((block.confidence_kind for block in self.blocks if block.confidence is not None), None)

    @property
    def text(self) -> str:
        """The blocks' texts, with an empty line between them, without headers and footers of the page."""
        return "\n\n".join(block.text for block in self.blocks if block.text and block.kind not in FURNITURE)


@dataclass(frozen=True)
class Document:
    """A document and its pages.

    Args:
        source: path or URL; "" for bytes.
        pages: those that were asked for, in order; none if the document cannot be opened.
        error: why it cannot be opened, or None. Each page has an error of its own.
    """

    source: str
    pages: tuple[PageRecord, ...] = ()
    error: ErrorInfo | None = None

    @property
    def text(self) -> str:
        """The pages' texts, with an empty line between them. A paragraph that goes on over a page stands where it begins."""
        return "\n\n".join(page.text for page in joined(self.pages) if page.text)

    @property
    def failed(self) -> Sequence[PageRecord]:
        """The pages with an error."""
        return [page for page in self.pages if page.error is not None]


def joined(pages: Iterable[PageRecord]) -> Iterator[PageRecord]:
    """Yield pages whose last paragraph or table has what goes on on the next pages, which no longer have it.

    At most `MAX_JOINED` pages are held; then a table goes on as another one.
    """
    waiting, rest = list[PageRecord](), list[Block]()  # the first page has what may go on, and `rest` is what does
    for page in pages:
        first = body_of(page)[:1]
        if waiting and len(rest) < MAX_JOINED and body_of(waiting[0]) and first and page.blocks[first[0]].continues:
            rest.append(page.blocks[first[0]])
            page = replace(page, blocks=(*page.blocks[: first[0]], *page.blocks[first[0] + 1 :]))
            if not body_of(page):
                waiting.append(page)
                continue
        yield from _with_rest(waiting, rest)
        waiting, rest = [page], []
    yield from _with_rest(waiting, rest)


def _with_rest(pages: Sequence[PageRecord], rest: Sequence[Block]) -> Iterator[PageRecord]:
    """Yield pages, the last block of the first of which gets the rest."""
    if not rest:
        yield from pages
        return
    page, last = pages[0], body_of(pages[0])[-1]
    block = page.blocks[last]
    if block.cells:
        cells = tuple(_joined_cells(block.cells, [part.cells for part in rest]))
        block = replace(block, cells=cells, text=table_text(cells))
    else:
        text = block.text
        for part in rest:
            text = f"{text[:-1]}{part.text}" if HYPHENATED.search(text) else f"{text} {part.text}"
        block = replace(block, text=text)
    yield replace(page, blocks=(*page.blocks[:last], block, *page.blocks[last + 1 :]))
    yield from pages[1:]


def _joined_cells(cells: Sequence[Cell], rest: Sequence[Sequence[Cell]]) -> Iterator[Cell]:
    """Yield the cells of a table that goes on, without the headers that its parts repeat."""
    yield from cells
    end = max(cell.row + cell.row_span for cell in cells)
    for part in rest:
        repeated = repeated_rows(cells, part)
        yield from (replace(cell, row=cell.row - repeated + end) for cell in part if cell.row >= repeated)
        end += max(cell.row + cell.row_span for cell in part) - repeated


def repeated_rows(cells: Sequence[Cell], rest: Sequence[Cell]) -> int:
    """Return how many rows at the top of the rest of a table repeat its header; 0 if they do not."""
    rows = max(1, max((cell.row + 1 for cell in rest if cell.header), default=1))
    first, again = (sorted((c.row, c.column, c.text) for c in part if c.row < rows) for part in (cells, rest))
    return rows if first == again and any(text for _, _, text in first) else 0


def num_columns(cells: Sequence[Cell]) -> int:
    return max(cell.column + cell.column_span for cell in cells)


def body_of(page: PageRecord) -> list[int]:
    """Return the indices of the blocks between headers and footers."""
    return [index for index, block in enumerate(page.blocks) if block.kind not in FURNITURE]


def table_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the texts of each row of a table. A cell that spans several rows or columns stands in the first one."""
    rows = list[list[str]]()
    for cell in cells:
        while len(rows) <= cell.row:
            rows.append([])
        row = rows[cell.row]
        row += [""] * (cell.column + 1 - len(row))
        row[cell.column] = cell.text
    return rows


def table_text(cells: Sequence[Cell]) -> str:
    """Return a table as text: a line for each row, a tab between cells."""
    return "\n".join("\t".join(" ".join(text.split()) for text in row) for row in table_rows(cells))


def pixel_box(box: Box, scale: float) -> Box:
    """Return a box in pixels of the rendered page."""
    left, top, right, bottom = (round(side * scale, 2) for side in box)
    return left, top, right, bottom


def union(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around all of these."""
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)
