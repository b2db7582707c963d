"""Where the tokens of a whole text belong: rows of items are found again, and the tokens between them are divided."""

from __future__ import annotations

import pytest
from sensorium.processors.retokenize import _distribute, _find_rows

Parts = list[tuple[int, tuple[int, ...]]]
ROW, END = 9, 8


@pytest.mark.parametrize(
    ("rows", "ids", "bounds"),
    [
        ([(ROW,)], [1, ROW, 2], [(1, 2)]),
        ([(ROW, ROW)], [ROW, ROW, 1], [(0, 2)]),
        ([(ROW, ROW), (ROW,)], [1, ROW, ROW, 2, ROW], [(1, 3), (4, 5)]),
        ([(ROW,), (ROW,)], [ROW, ROW], [(0, 1), (1, 2)]),  # items that touch
        ([(ROW, END), (ROW, END)], [ROW, END, 1, ROW, END], [(0, 2), (3, 5)]),
        ([(ROW,)], [1, 2], None),  # a row is missing
        ([(ROW,)], [ROW, 1, ROW], None),  # one more, from the user's text
        ([(ROW, ROW)], [ROW, 1, ROW], None),  # not in one piece
        ([(ROW, END)], [END, ROW], None),
        ([], [1, 2], []),
    ],
)
def test_rows_are_found(rows: list[tuple[int, ...]], ids: list[int], bounds: list[tuple[int, int]] | None) -> None:
    assert _find_rows(rows, ids) == bounds


LEFT, TEXT, RIGHT = 0, 1, 2
BETWEEN: Parts = [(LEFT, (10, 11)), (TEXT, (20, 21)), (RIGHT, (30,))]


@pytest.mark.parametrize(
    ("between", "ids", "shares"),
    [
        (BETWEEN, (10, 11, 20, 21, 30), BETWEEN),  # unchanged
        (BETWEEN, (10, 11, 25, 30), [(LEFT, (10, 11)), (TEXT, (25,)), (RIGHT, (30,))]),  # the text merges
        (BETWEEN, (10, 12, 21, 30), [(LEFT, (10,)), (TEXT, (12, 21)), (RIGHT, (30,))]),  # the text joins the left span's end
        (BETWEEN, (10, 11, 20, 35), [(LEFT, (10, 11)), (TEXT, (20, 35))]),  # and the right span's start
        (BETWEEN, (), []),
        ([(LEFT, (10,)), (RIGHT, (30,))], (10, 40, 30), [(LEFT, (10,)), (RIGHT, (40,)), (RIGHT, (30,))]),  # no text
        ([(LEFT, (10, 11))], (10, 40), [(LEFT, (10,)), (LEFT, (40,))]),  # neither text nor a start
        ([(TEXT, (20,)), (RIGHT, (30,))], (25, 30), [(TEXT, (25,)), (RIGHT, (30,))]),
        ([(LEFT, (10,)), (TEXT, (20,)), (3, (21,)), (RIGHT, (30,))], (10, 25, 30), None),  # two texts: whose is it?
    ],
)
def test_tokens_are_divided(between: Parts, ids: tuple[int, ...], shares: Parts | None) -> None:
    assert _distribute(between, ids, LEFT, RIGHT) == shares


def test_tokens_within_one_item_are_its_own() -> None:
    assert _distribute([(LEFT, (10, 11))], (12,), LEFT, LEFT) == [(LEFT, (12,))]


def test_the_ends_of_a_prompt_are_its_texts() -> None:
    assert _distribute([(0, (5,))], (6, 7), -1, 1) == [(0, (6, 7))]
    assert _distribute([(2, (5,))], (6, 7), 1, -1) == [(2, (6, 7))]
