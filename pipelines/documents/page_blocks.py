"""The blocks of a page whose lines have boxes: its tables, and the text around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...engine.elements import read_table
from ...mm.media.markup import TextPart
from ...mm.media.page_facts import TextLine
from ...mm.media.page_rules import Rule
from .blocks import Block, Source, table_text
from .confidence import CharScores, confidence_of, scored_line
from .markdown import markdown_file_blocks, plain_text_blocks
from .text_blocks import HYPHEN, blocks_of, body_size, column_spans
from .text_tables import TextTable, find_tables

Order = Callable[[Sequence[TextLine]], list[int]]


def page_blocks(
    lines: Sequence[TextLine],
    scores: Sequence[CharScores],
    order: Order,
    rules: Sequence[Rule] = (),
    source: Source = "text_layer",
    model: str = "",
) -> tuple[Block, ...]:
    """Return the blocks of lines in reading order.

    Args:
        scores: of the characters of each line.
        order: returns the indices of lines in reading order. A table is one line without text for it.
        rules: horizontal and vertical lines of the page.
    """
    tables = find_tables(lines, rules, column_spans(lines))
    if not tables:
        indices = order(lines)
        return blocks_of([lines[i] for i in indices], [scores[i] for i in indices], source, model)
    body, owners = body_size(lines), {min(table.lines): table for table in tables}
    taken = {index for table in tables for index in table.lines}
    kept = [index for index in range(len(lines)) if index not in taken or index in owners]
    shown = [TextLine("", owners[index].box, body) if index in owners else lines[index] for index in kept]
    blocks, run = list[Block](), list[int]()

    def end_run() -> None:
        blocks.extend(blocks_of([lines[i] for i in run], [scores[i] for i in run], source, model, body))
        run.clear()

    for index in (kept[i] for i in order(shown)):
        if index in owners:
            end_run()
            blocks.append(_table_block(owners[index], scores, source, model))
        else:
            run.append(index)
    end_run()
    return tuple(blocks)


def part_blocks(parts: Sequence[TextPart]) -> tuple[Block, ...]:
    """Return the parts of a text without boxes as blocks."""
    return tuple(block for part in parts for block in _part_blocks(part))


def _part_blocks(part: TextPart) -> Iterable[Block]:
    if part.kind == "markdown":
        return markdown_file_blocks(part.text)
    if part.kind == "plain":
        return plain_text_blocks(part.text)
    if part.kind != "table":
        return (Block(part.kind, part.text, level=part.level),)
    cells = read_table(part.text)
    return (Block("table", table_text(cells), cells=cells),)


def _table_block(table: TextTable, scores: Sequence[CharScores], source: Source, model: str) -> Block:
    lines = tuple(
        scored_line(piece.text.replace(HYPHEN, "-"), piece.box, scores[piece.line][piece.first :]) for piece in table.pieces
    )
    confidence = confidence_of(lines)
    text = table_text(table.cells)
    return Block("table", text, table.box, lines, confidence=confidence, source=source, model=model, cells=table.cells)
