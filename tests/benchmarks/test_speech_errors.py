"""Errors of transcripts by kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.speech_errors import Errors, count_errors


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("a b c", "a b c", Errors(3)),
        ("a b c", "a x c", Errors(3, wrong=1)),
        ("a b c", "a c", Errors(3, lost=1)),
        ("a b c", "a b b c", Errors(3, doubled=1)),
        ("a b c", "a b a b c", Errors(3, doubled=2)),
        ("a b c", "a b x c", Errors(3, invented=1)),
        ("", "you", Errors(0, invented=1)),
        ("a b c d e f", "x c d e f f", Errors(6, wrong=1, lost=1, doubled=1)),
    ],
)
def test_kinds_of_errors(said: str, heard: str, errors: Errors) -> None:
    assert count_errors(said.split(), heard.split()) == errors
