"""Tables among lines with boxes: ruled grids, aligned columns, what is none, and tables that go on over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pdf_files import pdf_of, stream
from sensorium.engine.elements import Cell
from sensorium.mm.media.page_facts import LineCut, TextLine, page_facts
from sensorium.mm.media.page_rules import Rule
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import blocks as blocks_module
from sensorium.pipelines.documents import text_tables
from sensorium.pipelines.documents.blocks import Block, PageRecord, joined, table_rows
from sensorium.pipelines.documents.fold import folded
from sensorium.pipelines.documents.grids import Grid, find_grids
from sensorium.pipelines.documents.page_blocks import page_blocks
from sensorium.pipelines.documents.projections import Projected, project
from sensorium.pipelines.documents.text_blocks import text_order
from sensorium.pipelines.documents.text_tables import TextTable, find_tables

SIZE = 10.0


def row(top: float, *texts: tuple[float, str]) -> list[TextLine]:
    """Return lines side by side: their left ends and texts, whose characters are 5 points wide."""
    return [TextLine(text, (left, top, left + 5 * len(text), top + SIZE), SIZE) for left, text in texts]


def rows(
    *texts: tuple[str, ...], top: float = 50, step: float = 15, lefts: tuple[float, ...] = (50, 150, 250)
) -> list[TextLine]:
    """Return the lines of a table; "" is an empty cell."""
    lines = list[TextLine]()
    for number, cells in enumerate(texts):
        lines += row(top + step * number, *((left, text) for left, text in zip(lefts, cells, strict=True) if text))
    return lines


def texts_of(table: TextTable) -> list[list[str]]:
    return table_rows(table.cells)


def grid(xs: tuple[float, ...], ys: tuple[float, ...]) -> list[Rule]:
    return [*((xs[0], y, xs[-1], y) for y in ys), *((x, ys[0], x, ys[-1]) for x in xs)]


DATA = (("Item", "Number", "Price"), ("apples", "12", "3.40"), ("a long name", "7", "1.25"), ("pears", "", "2.00"))


def test_a_ruled_table() -> None:
    rules = grid((45, 145, 245, 345), (48, 63, 78, 93, 108))
    (table,) = find_tables([*row(20, (50, "above")), *rows(*DATA), *row(120, (50, "below"))], rules)
    assert texts_of(table) == [list(row) for row in DATA]
    assert table.box == (45, 48, 345, 108)
    assert [cell.column for cell in table.cells if cell.header] == [0, 1, 2]
    assert table.lines == set(range(1, 12))


def test_cells_that_span_rows_and_columns() -> None:
    rules = [rule for rule in grid((45, 145, 245, 345), (48, 63, 78, 93)) if rule[0] == rule[2] or rule[1] != 78]
    rules += [(145.0, 78.0, 345.0, 78.0)]  # the first column of rows 1 and 2 is one cell
    rules = [rule for rule in rules if rule != (145, 48, 145, 93)] + [(145.0, 63.0, 145.0, 93.0)]  # so are two of row 0
    lines = rows(("Group", "", "Other"), ("name", "1", "2"), ("", "3", "4"))
    (table,) = find_tables(lines, rules)
    assert table.cells[:3] == (Cell(0, 0, "Group", 1, 2, True), Cell(0, 2, "Other", 1, 1, True), Cell(1, 0, "name", 2, 1))
    assert [(cell.row, cell.text) for cell in table.cells[3:]] == [(1, "1"), (1, "2"), (2, "3"), (2, "4")]


def test_a_rule_without_borders_and_lines_cut_by_rules() -> None:
    """LaTeX draws a piece of a vertical rule for each row. Text on both sides of it may be one line of the text layer."""
    pieces = [(x, 50.0 + 15 * n, x, 64.9 + 15 * n) for x in (145.0, 245.0) for n in range(3)]
    rules = [*pieces, *((45.0, y, 345.0, y) for y in (50.0, 65.0, 80.0, 95.0))]
    cut = TextLine("one two", (140, 52, 175, 62), SIZE, (LineCut(3, 144, 146),))
    lines = [cut, *rows(("a", "b", "c"), ("d", "e", "f"), top=67)]
    (table,) = find_tables(lines, rules)
    assert texts_of(table) == [["one", "two", ""], ["a", "b", "c"], ["d", "e", "f"]]


def test_lines_between_two_rules_are_rows_if_each_cell_has_one() -> None:
    rules = grid((45, 145, 245, 345), (48, 63, 110))
    (table,) = find_tables(rows(("a", "b", "c"), ("1", "2", "3"), ("4", "5", "6"), ("7", "8", "9")), rules)
    assert texts_of(table) == [["a", "b", "c"], ["1", "2", "3"], ["4", "5", "6"], ["7", "8", "9"]]
    wrapped = [*rows(("a", "b", "c")), *row(65, (50, "first")), *row(77, (50, "second")), *row(65, (150, "x"), (250, "y"))]
    (table,) = find_tables(wrapped, rules)
    assert texts_of(table) == [["a", "b", "c"], ["first second", "x", "y"]]


@pytest.mark.parametrize("name", ["frame", "empty form", "one column", "chart"])
def test_rules_that_are_no_table(name: str) -> None:
    rules = {
        "frame": grid((10, 400), (10, 400)),
        "empty form": grid((45, 145, 245, 345), (48, 63, 78, 93, 108)),
        "one column": grid((45, 345), (48, 63, 78, 93)),
        "chart": grid(tuple(range(40, 400, 20)), tuple(range(40, 400, 20))),
    }[name]
    lines = row(50, (50, "a title")) if name == "empty form" else row(50, (50, "a")) + row(65, (50, "b")) + row(80, (50, "c"))
    assert find_tables(lines, rules) == []


def test_aligned_columns() -> None:
    lines = [*row(30, (50, "A paragraph that stands above the table and is as wide.")), *rows(*DATA)]
    lines += row(130, (50, "A paragraph that stands below the table and is as wide."))
    (table,) = find_tables(lines)
    assert texts_of(table) == [list(row) for row in DATA]
    assert [cell.text for cell in table.cells if cell.header] == ["Item", "Number", "Price"]
    blocks = page_blocks(lines, [()] * len(lines), text_order)
    assert [block.kind for block in blocks] == ["paragraph", "table", "paragraph"]
    assert blocks[1].text == "Item\tNumber\tPrice\napples\t12\t3.40\na long name\t7\t1.25\npears\t\t2.00"
    assert len(blocks[1].lines) == 11


def test_a_header_above_a_rule() -> None:
    rules = [(48.0, y, 290.0, y) for y in (47.0, 77.5, 108.0)]
    (table,) = find_tables(rows(("Item", "2023", "2024"), ("", "USD", "USD"), ("a", "1", "2"), ("b", "3", "4")), rules)
    assert {cell.row for cell in table.cells if cell.header} == {0, 1}
    assert len(texts_of(table)) == 4


def test_rules_are_compared_with_the_rows_beside_them_only() -> None:
    reads = 0

    class CountedRule(tuple):
        def __getitem__(self, index: int) -> float:
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

    count = 400
    lines = [line for i in range(count) for line in row(60.0 * i, (50, "a"), (300, "b"))]
    assert find_tables(lines, [CountedRule((40.0, 60.0 * i, 340.0, 60.0 * i)) for i in range(count)]) == []
    assert reads < 100 * count


def test_rows_in_very_many_rules_have_no_header_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = rows(("Name", "Town"), ("Ann", "Ulm"), ("Bob", "Bonn"), lefts=(50, 150))
    rules = [(48.0, lines[0].box[3] + 1 + i / 10, 180.0, lines[0].box[3] + 1 + i / 10) for i in range(2)]
    assert any(cell.header for cell in find_tables(lines, rules)[0].cells)
    monkeypatch.setattr(text_tables, "_MAX_RULES", 1)
    assert not any(cell.header for cell in find_tables(lines, rules)[0].cells)


def test_a_cell_that_crosses_columns() -> None:
    lines = rows(("", "", ""), ("a", "1", "2"), ("b", "3", "4"), ("c", "5", "6"), ("d", "7", "8"))
    lines += row(50, (50, "name"), (160, "both of the columns"))
    (table,) = find_tables(lines)
    assert table.cells[1] == Cell(0, 1, "both of the columns", 1, 2, header=True)


def test_cells_of_several_lines() -> None:
    """Lines of one row are closer than rows, wherever the other cells stand."""
    lines = [*rows(("Name", "What it is", "No"), ("one", "a thing of", "1"), top=50, step=20)]
    lines += [
        *row(80, (150, "two lines")),
        *row(100, (150, "a thing of")),
        *row(110, (50, "two"), (150, "two more"), (250, "2")),
    ]
    lines += [*row(130, (50, "three"), (150, "short"), (250, "3"))]
    (table,) = find_tables(lines)
    assert texts_of(table)[1:] == [
        ["one", "a thing of two lines", "1"],
        ["two", "a thing of two more", "2"],
        ["three", "short", "3"],
    ]
    last = [*lines, *row(140, (150, "and long")), *row(150, (50, "Then text."))]
    (table,) = find_tables(last)
    assert texts_of(table)[-1] == ["three", "short and long", "3"]


@pytest.mark.parametrize(
    "lines",
    [
        rows(*(("•", f"item {n}", "") for n in range(5)), lefts=(50, 70, 250)),
        rows(*((f"{n}.", f"item {n}", "") for n in range(5)), lefts=(50, 70, 250)),
        rows(*((str(n), f"line {n}", "") for n in range(5)), lefts=(50, 70, 250)),
        rows(*((f"Chapter {n} . . . . . .", str(7 * n), "") for n in range(5)), lefts=(50, 250, 350)),
        rows(*(("running text of one column", "running text of another one", "") for _ in range(5)), lefts=(50, 200, 400)),
        rows(*(("note" * (n % 3), "running text of one column" + "." * (n == 3), "") for n in range(5)), lefts=(50, 100, 400)),
        rows(("a", "b", "c"), ("d", "e", "f")),
        rows(*((f"number {n}", "", "") for n in range(5))),
        [],
    ],
    ids=["bullets", "list", "code", "contents", "columns", "notes", "two rows", "one column", "nothing"],
)
def test_lines_that_are_no_table(lines: list[TextLine]) -> None:
    assert find_tables(lines) == []


def test_a_table_in_a_column_of_text() -> None:
    prose = [part for n in range(40) for part in row(50 + 12 * n, (300, "this is running text in a column"))]
    table = rows(*DATA[:3], lefts=(20, 110, 200), top=62, step=12)
    left = [part for n in range(10) for part in row(110 + 12 * n, (20, "this is running text in a column"))]
    blocks = page_blocks([*table, *left, *prose], [()] * (len(table) + 50), text_order)
    assert [block.kind for block in blocks] == ["table", "paragraph", "paragraph"]
    assert blocks[0].text.splitlines()[1] == "apples\t12\t3.40"


def drawn(shown: str, page: str = "") -> bytes:
    """Return a PDF of one page; its content may draw the form F, which is moved by 100 points to the right."""
    return pdf_of(
        {
            1: "<</Type/Catalog/Pages 2 0 R>>",
            2: "<</Type/Pages/Kids[3 0 R]/Count 1>>",
            3: f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 400 300]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>"
            f"/XObject<</F 6 0 R>>>>{page}>>",
            4: stream("", f"{shown} BT /F1 12 Tf 30 200 Td (text) Tj ET"),
            5: "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            6: stream("/Type/XObject/Subtype/Form/BBox[0 0 400 300]/Matrix[1 0 0 1 100 0]", "10 10 m 110 10 l S"),
        }
    )


@pytest.mark.parametrize(
    ("shown", "rules"),
    [
        ("10 20 m 110 20 l S", [(10, 280, 110, 280)]),
        ("10 20 m 10 120 l S", [(10, 180, 10, 280)]),
        ("10 20 100 1 re f", [(10, 279.5, 110, 279.5)]),
        ("10 20 30 40 re S", [(10, 240, 10, 280), (10, 240, 40, 240), (10, 280, 40, 280), (40, 240, 40, 280)]),
        ("10 20 30 40 re f", []),
        ("10 20 m 110 30 l S", []),
        ("10 20 m 20 20 30 20 40 20 c S", []),
        ("q 2 0 0 2 0 0 cm 10 20 m 60 20 l S Q", [(20, 260, 120, 260)]),
        ("/F Do", [(110, 290, 210, 290)]),
    ],
)
def test_rules_of_a_page(shown: str, rules: list[Rule]) -> None:
    (facts,) = page_facts(drawn(shown), [1], MediaPolicy())
    assert [pytest.approx(rule, abs=0.1) for rule in rules] == list(facts.rules)


def test_rules_of_a_turned_page() -> None:
    (facts,) = page_facts(drawn("10 20 m 110 20 l S", "/Rotate 90"), [1], MediaPolicy())
    assert list(facts.rules) == [pytest.approx((20, 10, 20, 110), abs=0.1)]


def test_a_page_of_many_paths_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "10 20 m 110 20 l S 10 30 m 110 30 l S"
    monkeypatch.setattr("sensorium.mm.media.page_rules.MAX_PATHS", 2)
    assert len(page_facts(drawn(shown), [1], MediaPolicy())[0].rules) == 2
    monkeypatch.setattr("sensorium.mm.media.page_rules.MAX_PATHS", 1)
    assert page_facts(drawn(shown), [1], MediaPolicy())[0].rules == ()


def test_lines_can_be_cut_at_gaps_and_rules() -> None:
    shown = "BT /F1 12 Tf 30 250 Td (one) Tj 34 0 Td (two) Tj ET BT /F1 12 Tf 30 220 Td (ab) Tj 14 0 Td (cd) Tj ET"
    shown += " 43.6 200 m 43.6 240 l S"
    (facts,) = page_facts(drawn(shown), [1], MediaPolicy())
    gap, tight, _ = facts.lines
    assert (gap.text, [cut.position for cut in gap.cuts]) == ("one two", [3])
    assert 45 < gap.cuts[0].left < 55 < gap.cuts[0].right < 66
    assert (tight.text, [cut.position for cut in tight.cuts]) == ("abcd", [2])


def table_page(number: int, *texts: tuple[str, ...], header: int = 0, left: float = 50, top: float = 20) -> PageRecord:
    cells = tuple(Cell(r, c, text, header=r < header) for r, row in enumerate(texts) for c, text in enumerate(row))
    text = "\n".join("\t".join(row) for row in texts)
    return PageRecord(number, 300, 400, way="text_layer", blocks=(Block("table", text, (left, top, 250, 390), cells=cells),))


def tables_of(*pages: PageRecord) -> list[list[list[str]]]:
    found = joined(folded(lambda: pages))
    return [table_rows(block.cells) for page in found for block in page.blocks]


HEAD, ONE, TWO, THREE = ("n", "v"), ("a", "1"), ("b", "2"), ("c", "3")


def test_tables_that_go_on_over_pages() -> None:
    with_header = partial(table_page, header=1)
    assert tables_of(with_header(1, HEAD, ONE), with_header(2, HEAD, TWO), with_header(3, HEAD, THREE)) == [
        [["n", "v"], ["a", "1"], ["b", "2"], ["c", "3"]]
    ]
    assert tables_of(with_header(1, HEAD, ONE), table_page(2, TWO), table_page(3, THREE)) == [
        [["n", "v"], ["a", "1"], ["b", "2"], ["c", "3"]]
    ]
    pages = [with_header(1, HEAD, ONE), table_page(2, TWO)]
    text = Block("paragraph", "After it.", (50, 395, 99, 399))
    assert len(tables_of(pages[0], replace(pages[1], blocks=(text, *pages[1].blocks)))) == 3
    assert "".join(project(Projected("a", None, list(folded(lambda: pages))), "csv")) == "n,v\na,1\nb,2\n"


@pytest.mark.parametrize(
    "second",
    [
        table_page(2, (*TWO, "x")),
        table_page(2, TWO, left=70),
        table_page(2, ("m", "w"), TWO, header=1),
        table_page(3, TWO),
        table_page(2, TWO, top=300),
    ],
    ids=["columns", "place", "header", "page", "below"],
)
def test_tables_that_are_others(second: PageRecord) -> None:
    assert len(tables_of(table_page(1, HEAD, ONE, header=1), second)) == 2


def test_a_table_over_very_many_pages_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_JOINED", 2)
    pages = [table_page(n, HEAD, (str(n), "v"), header=1) for n in range(1, 6)]
    assert [len(table) for table in tables_of(*pages)] == [4, 3]


def test_a_header_that_a_table_repeats_is_no_header_of_the_page() -> None:
    pages = [table_page(n, HEAD, (str(n), "v"), header=1) for n in range(1, 6)]
    assert all(block.kind == "table" for page in folded(lambda: pages) for block in page.blocks)


def test_a_line_is_looked_at_in_few_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crosses of rules may overlap without touching each other, so that all of them hold the same lines."""
    shifts = [12.0 * number for number in range(30)]
    rules = [rule for d in shifts for rule in ((d, 500 + d, d + 900, 500 + d), (d + 894, d, d + 894, 503 + d))]
    lines, looked = row(490, *((800 + i, "a") for i in range(5))), 0
    read_table = text_tables._ruled_table

    def counted(grid: Grid, inside: Sequence[tuple[int, TextLine]]) -> TextTable | None:
        nonlocal looked
        looked += len(inside)
        return read_table(grid, inside)

    monkeypatch.setattr(text_tables, "_ruled_table", counted)
    assert find_tables(lines, rules) == []
    assert looked == text_tables._MAX_TRIES * len(lines)


def test_what_a_grid_holds() -> None:
    (found,) = find_grids(grid((0, 50, 100), (0, 20)))
    boxes = np.array([(10, 5, 40, 15), (10, 15, 40, 30), (60, 5, 105, 15), (60, 5, 140, 15), (-90, 5, 90, 15)])
    assert found.holds(boxes).tolist() == [True, False, True, False, False]
    assert found.holds(boxes[:0]).tolist() == []
