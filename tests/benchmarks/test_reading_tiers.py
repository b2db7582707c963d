"""Pages and error rates of the table of what reads documents without a model."""

from __future__ import annotations

import pytest

from benchmarks.confidence import FONTS
from benchmarks.reading_tiers import LAYOUTS, PAGE_FONTS, TruePage, errors, joined_languages, page_of, rate


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_have_the_layout_of_their_name(layout: str) -> None:
    if not (FONTS / PAGE_FONTS[0]).exists():
        pytest.skip("needs the fonts DejaVu and Liberation")
    page = page_of(layout, "1", PAGE_FONTS[0])
    assert page == page_of(layout, "1", PAGE_FONTS[0]) != page_of(layout, "2", PAGE_FONTS[0])
    assert len({x for _, x, _ in page.lines}) == {"two columns": 2, "table": 4}.get(layout, 1)


def test_tesseract_reads_with_the_languages_that_it_has() -> None:
    assert joined_languages(["deu", "eng", "osd"]) == "eng+deu"
    assert joined_languages(["osd"]) == ""


def test_errors_are_counted_without_spaces() -> None:
    page = TruePage((("two words", 0, 0), ("next line", 0, 20)), "", 20)
    assert errors(page, "two words next\nline") == (0, 16)
    assert errors(page, "two w0rds\nline") == (5, 16)
    assert rate([(1, 10), (0, 30)]) == "2.5"
