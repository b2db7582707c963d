"""Scores of documents: edit distances, tables, and where texts are found."""

from __future__ import annotations

import pytest

from benchmarks.documents import distance, find, plain, relations, score, sources, tables_of, teds


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_edit_distance(a: str, b: str, edits: int) -> None:
    assert distance(a, b) == edits


def test_tables() -> None:
    truth = [["a", "b"], ["1", "2"]]
    assert teds(truth, truth) == 1
    assert teds(truth, [["a", "b"]]) == pytest.approx(1 - 3 / 7)
    assert teds(truth, [["a", "c"], ["1", "2"]]) == pytest.approx(1 - 1 / 7)
    assert relations(truth, truth) == [True] * 4
    assert relations(truth, [["a", "b"], ["2", "1"]]).count(True) == 1
    assert tables_of("text\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| x |\n|---|") == [truth, [["x"]]]


def test_texts_are_found_with_few_errors() -> None:
    text = "".join(map(str, range(1000, 1030)))
    assert find(text, f"12{text}") == 2
    assert find(text, f"12{text.replace('1005', '1x05')}") is not None
    assert find(text, "nothing") is None


def test_a_perfect_reading_has_full_scores() -> None:
    pages = sources(2, 1)
    texts = ["\n\n".join(page.texts) + "\n" + "\n".join(f"| {' | '.join(row)} |" for row in page.table) for page in pages]
    assert score(pages, texts) == {"text": 1, "order": 1, "cells": 1, "TEDS": 1, "CER": 0}
    assert plain("a b-c, 1.5\n") == "abc,1.5"
    assert sources(2, 1) == pages
