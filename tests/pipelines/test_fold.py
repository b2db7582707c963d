"""What only several pages tell: headers, footers, page numbers, paragraphs over pages, and columns of text layers."""

from __future__ import annotations

from functools import partial

import pytest
from pdf_files import pdf_of, stream
from sensorium.mm.media.page_facts import TextLine, page_facts
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import fold as fold_module
from sensorium.pipelines.documents.blocks import Block, Document, Line, PageRecord, joined
from sensorium.pipelines.documents.fold import folded
from sensorium.pipelines.documents.projections import Projected, project
from sensorium.pipelines.documents.text_blocks import blocks_of, text_order

BODY = "The text of this page is long enough to fill a line."


def text_line(text: str, top: float, left: float = 50, width: float | None = None) -> TextLine:
    return TextLine(text, (left, top, left + (5 * len(text) if width is None else width), top + 10), 10)


def page(number: int, *lines: tuple[str, float], height: float = 400) -> PageRecord:
    blocks = blocks_of([text_line(text, top) for text, top in lines], [()] * len(lines))
    return PageRecord(number, 300, height, way="text_layer", blocks=blocks)


def fold(*pages: PageRecord) -> list[PageRecord]:
    return list(folded(lambda: pages))


def furniture(*pages: PageRecord) -> list[list[tuple[str, str]]]:
    return [[(block.kind, block.text) for block in page.blocks if block.kind.startswith("page_")] for page in fold(*pages)]


def test_headers_and_page_numbers() -> None:
    pages = [page(n, ("Annual Report", 20), (f"{BODY} {n}.", 100), (f"Page {n + 4} of 20", 380)) for n in range(1, 6)]
    pages[2] = page(3, ("Annual Report", 21), (f"{BODY} 3.", 100))
    assert furniture(*pages) == [
        [("page_header", "Annual Report"), *([] if n == 3 else [("page_footer", f"Page {n + 4} of 20")])] for n in range(1, 6)
    ]
    assert [len(found.blocks) for found in fold(*pages)] == [3, 3, 2, 3, 3]
    text = "".join(project(Projected("a", None, fold(*pages)), "txt"))
    assert text == "\f".join(f"{BODY} {n}.\n" for n in range(1, 6))


def test_number_signs_are_no_numbers() -> None:
    pages = [page(n, ("#" if n == 1 else str(n + 5), 20), (f"{BODY} {n}.", 100)) for n in range(1, 5)]
    assert furniture(*pages) == [[], *([("page_header", str(n + 5))] for n in range(2, 5))]


def test_the_work_grows_with_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(number: int) -> int:
        calls, is_same = list[None](), fold_module._is_same
        with monkeypatch.context() as patch:
            patch.setattr(fold_module, "_is_same", lambda *edges: calls.append(None) or is_same(*edges))
            assert all(furniture(*(page(n, ("Annual Report", 20), (BODY, 200)) for n in range(1, number + 1))))
        return len(calls)

    assert compared(200) < 2.5 * compared(100)


def test_headings_that_count_are_no_headers() -> None:
    def chapter(number: int, text: str) -> PageRecord:
        title, *rest = page(number, (text, 20), (f"{BODY} {number}.", 100)).blocks
        return PageRecord(number, 300, 400, blocks=(Block("heading", text, title.box, title.lines, 1), *rest))

    assert furniture(*(chapter(n, f"Chapter {n}") for n in range(1, 6))) == [[]] * 5
    assert furniture(*(chapter(n, "Company 7") for n in range(1, 6))) == [[("page_header", "Company 7")]] * 5


def test_headers_of_left_and_right_pages() -> None:
    pages = [page(n, ("A Book" if n % 2 else f"{n} CHAPTER", 20), (f"{BODY} {n}.", 100)) for n in range(1, 9)]
    assert furniture(*pages) == [[("page_header", "A Book" if n % 2 else f"{n} CHAPTER")] for n in range(1, 9)]


@pytest.mark.parametrize(
    "pages",
    [
        [page(n, ("Annual Report", 20), (BODY, 100)) for n in (1, 2)],  # too few
        [page(n, ("Annual Report", 20), (BODY, 100)) for n in (1, 11, 21)],  # too far from each other
        [page(n, ("Annual Report", 20 + 10 * n), (BODY, 200)) for n in (1, 2, 3)],  # not at one place
        [page(n, (BODY, 20), (str(n * n + 7), 380)) for n in range(1, 6) if n],  # numbers that do not count
        [page(n, ("a", 180), ("Annual Report", 200)) for n in range(1, 6)],  # not at an edge
    ],
    ids=["few", "far", "moving", "numbers", "middle"],
)
def test_lines_that_are_no_headers(pages: list[PageRecord]) -> None:
    pages = [page for page in pages if page is not None]
    kept = [[entry for entry in entries if entry[1] != BODY] for entries in furniture(*pages)]
    assert kept == [[]] * len(pages)


def test_a_header_that_stands_close_to_the_text() -> None:
    pages = [page(n, ("The Annual Report of Our Company", 40), (f"{n} is the number of this page.", 52)) for n in range(1, 5)]
    assert {len(found.blocks) for found in pages} == {1}
    first = fold(*pages)[0].blocks
    assert [(block.kind, block.text) for block in first] == [
        ("page_header", "The Annual Report of Our Company"),
        ("page_header", "1 is the number of this page."),
    ]
    pages = [page(n, ("The Annual Report of Our Company", 40), ("abcd"[n - 1] * 30, 52)) for n in range(1, 5)]
    first = fold(*pages)[0].blocks
    assert [(block.kind, block.text) for block in first] == [
        ("page_header", "The Annual Report of Our Company"),
        ("paragraph", "a" * 30),
    ]
    assert (first[0].box, first[1].box) == ((50, 40, 210, 50), (50, 52, 200, 62))
    assert [line.text for line in first[1].lines] == ["a" * 30]


@pytest.mark.parametrize(
    ("last", "first", "text"),
    [
        (f"{BODY[:-1]} and", "over the page.", f"{BODY[:-1]} and over the page."),
        ("It has room,", "over the page", None),
        ("A hyphen-", "ated word.", "A hyphenated word."),
        ("It ends.", "over the page", None),
        ("It goes on", "Over the page", None),
        ('He said "no."', "over", None),
    ],
)
def test_paragraphs_over_pages(last: str, first: str, text: str | None) -> None:
    pages = [page(n, ("Annual Report", 20), (f"{BODY} {n}.", 100), (f"{n}", 380)) for n in range(1, 5)]
    pages[1] = page(2, ("Annual Report", 20), (BODY, 100), (BODY, 150), (last, 200), ("2", 380))
    pages[2] = page(3, ("Annual Report", 20), (first, 100), ("A heading between", 140), ("3", 380))
    found = fold(*pages)
    assert [[block.continues for block in page.blocks].count(True) for page in found] == [0, 0, int(text is not None), 0]
    assert any(block.text == first for block in found[2].blocks)  # the tree keeps what stands where
    texts = [page.text for page in joined(found)]
    texts[1] = texts[1].removeprefix(f"{BODY}\n\n{BODY}\n\n")
    assert texts[1:3] == ([text, "A heading between"] if text else [last, f"{first}\n\nA heading between"])
    assert (text or last) in Document("a", tuple(found)).text
    assert (f"\n\n{text or last}\n" in "".join(project(Projected("a", None, found), "md"))) is True


def test_a_paragraph_over_three_pages() -> None:
    pages = fold(page(1, ("It goes on-", 100)), page(2, ("ward and for-", 100)), page(3, ("ward.", 100), ("The end.", 200)))
    assert [(found.number, found.text) for found in joined(pages)] == [
        (1, "It goes onward and forward."),
        (2, ""),
        (3, "The end."),
    ]
    long = "A text of a model that has no boxes and is long enough"
    answers = [PageRecord(n, blocks=(Block("paragraph", text, source="model"),)) for n, text in ((1, long), (2, "to go on"))]
    assert [found.text for found in joined(fold(*answers))] == [f"{long} to go on", ""]


def test_a_page_of_a_range_that_goes_on_alone() -> None:
    pages = fold(page(1, ("It goes on-", 100)), page(3, ("ward.", 100)))
    assert [found.text for found in joined(pages)] == ["It goes on-", "ward."]
    marked = PageRecord(2, blocks=(Block("paragraph", "on.", continues=True),))
    assert [found.text for found in joined([marked])] == ["on."]
    assert [found.text for found in joined([PageRecord(1), marked])] == ["", "on."]


def columns(rows: int, words: str = "some words of a column") -> list[TextLine]:
    """Return lines of two columns in the order of rows, below a title and above a page number."""
    lines = [text_line("A title over both of the columns, which is wide", 20, 50, 500)]
    for row in range(rows):
        lines += [text_line(f"{words} {column} {row}", 50 + 12 * row, left, 200) for column, left in (("a", 50), ("b", 300))]
    return [*lines, text_line("17", 300, 270)]


def test_columns_of_text_layers() -> None:
    lines = columns(4)
    order = [lines[index].text.split()[-2:] for index in text_order(lines)]
    assert order == [["is", "wide"], *(["a", str(n)] for n in range(4)), *(["b", str(n)] for n in range(4)), ["17"]]
    for other in (columns(4, "cell"), columns(2), columns(0), []):
        assert text_order(other) == list(range(len(other)))
    single = [text_line("One column of text that is wide enough to be one", 100 - 12 * row) for row in range(6)]
    assert text_order(single) == list(range(6))


def test_lines_keep_their_confidence() -> None:
    line = Line("Annual Report", (50, 20, 100, 30), 0.5)
    block = partial(Block, "heading", "Annual Report", line.box, (line,), level=1, confidence=0.5, source="reader")
    first, *_ = fold(*(PageRecord(n, 300, 400, blocks=(block(),)) for n in range(1, 5)))
    (found,) = first.blocks
    assert (found.kind, found.level, found.confidence, found.source) == ("page_header", 0, 0.5, "reader")


def test_two_columns_of_a_pdf() -> None:
    shown = "".join(
        f"BT /F1 10 Tf {left} {200 - 14 * row} Td (words of column {name} in row {row}) Tj ET\n"
        for row in range(5)
        for name, left in (("a", 30), ("b", 220))
    )
    objects = {
        1: "<</Type/Catalog/Pages 2 0 R>>",
        2: "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        3: "<</Type/Page/Parent 2 0 R/MediaBox[0 0 400 300]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        4: stream("", shown),
        5: "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    }
    (facts,) = page_facts(pdf_of(objects), [1], MediaPolicy())
    lines = [facts.lines[index].text for index in text_order(facts.lines)]
    assert lines == [f"words of column {name} in row {row}" for name in "ab" for row in range(5)]
