"""Confidences of words, lines, blocks and pages: the calibration of the reader's, and the probabilities of a model's tokens."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sensorium.mm.media.page_facts import LineCut, PageFacts, TextLine
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents.blocks import Block, Line, PageRecord
from sensorium.pipelines.documents.confidence import (
    CALIBRATION,
    scored_line,
    with_calibration,
    with_token_confidences,
    word_scores,
)
from sensorium.pipelines.documents.confidence import RAPIDOCR as calibrated
from sensorium.pipelines.documents.fit_calibration import calibration_error, fit
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.page_blocks import page_blocks
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.projections import page_fields
from sensorium.pipelines.documents.stop import StopSignal
from sensorium.pipelines.documents.text_blocks import text_order

from benchmarks.confidence import (
    FONTS,
    ReadPicture,
    TrueWord,
    draw_page,
    is_right,
    picture_of,
    words_of,
)

BOX = (0.0, 0.0, 100.0, 10.0)


def test_the_calibration_says_where_it_is_from_and_is_monotone() -> None:
    data = json.loads(CALIBRATION.read_text())
    assert {"reader", "made_by", "pages", "fonts", "words", "right", "score"} <= {*data}
    assert data["words"] > 10_000
    knots = data["knots"]
    assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(knots))
    assert all(0 < share < 1 for _, share in knots)
    assert [calibrated(score) for score, _ in knots] == [share for _, share in knots]
    assert calibrated.reader == "rapidocr"
    assert (calibrated(0.0), calibrated(2.0)) == (knots[0][1], knots[-1][1])
    (a, b), (c, d) = knots[3:5]
    assert calibrated((a + c) / 2) == pytest.approx((b + d) / 2)


def test_words_have_the_mean_score_of_their_characters() -> None:
    assert word_scores("ab cde", (0.5, 1.0, 0.25, 0.5, 0.75)) == [0.75, 0.5]
    line = scored_line("ab cde", BOX, (0.5, 1.0, 0.25, 0.5, 0.75))
    assert (line.word_confidences, line.confidence) == ((0.75, 0.5), 0.625)
    (block,) = with_calibration([Block("paragraph", "ab cde", lines=(line,), source="reader")], calibrated)
    (line,) = block.lines
    assert line.word_confidences == (round(calibrated(0.75), 4), round(calibrated(0.5), 4))
    assert block.confidence == line.confidence == pytest.approx(sum(line.word_confidences) / 2, abs=1e-4)
    (same,) = with_calibration(
        [Block("paragraph", "ab", lines=(Line("ab", BOX, 0.123456, (0.123456,)),), source="reader")], None
    )
    assert (block.confidence_kind, same.confidence_kind, same.confidence) == ("calibrated", "reader_score", 0.1235)
    assert scored_line("ab", BOX, ()) == Line("ab", BOX)


def test_blocks_and_tables_have_the_mean_of_their_words() -> None:
    lines = [TextLine("one two", (0, 0, 70, 10), 10), TextLine("three", (0, 12, 50, 22), 10)]
    (block,) = with_calibration(page_blocks(lines, [(1.0,) * 3 + (0.5,) * 3, (0.9,) * 5], text_order), calibrated)
    words = [word for line in block.lines for word in line.word_confidences]
    assert words == [round(calibrated(score), 4) for score in (1.0, 0.5, 0.9)]
    assert block.confidence == pytest.approx(sum(words) / 3, abs=1e-4)
    row = "a 12 5"
    cuts = (LineCut(2, 20, 100), LineCut(5, 120, 200))
    rows = [TextLine(row, (0, 20 * i, 210, 20 * i + 10), 10, cuts) for i in range(4)]
    (table,) = with_calibration(page_blocks(rows, [(1.0, 0.9, 0.9, 0.5)] * 4, text_order), calibrated)
    assert table.kind == "table"
    assert [line.text for line in table.lines[:3]] == ["a", "12", "5"]
    assert [line.confidence for line in table.lines[:3]] == [round(calibrated(score), 4) for score in (1.0, 0.9, 0.5)]


def read_page(scores: list[float], monkeypatch: pytest.MonkeyPatch) -> PageRecord:
    """Return the record of a page with one word of four letters on each line, whose letters have these scores."""
    texts = [f"wor{number}" for number in range(len(scores))]
    boxes = np.array([[(50, y), (90, y), (90, y + 20), (50, y + 20)] for y in range(50, 50 + 40 * len(scores), 40)])
    places = (0.1, 0.4, 0.6, 0.9)
    result = SimpleNamespace(
        boxes=boxes,
        txts=texts,
        scores=scores,
        word_results=[[((places, (score,) * 4), None, True)] for score in scores],
    )
    reader, size = LinesReader(), (400, 100 + 40 * len(scores))
    monkeypatch.setitem(reader.__dict__, "_engine", lambda pixels: result)
    task = PageTask(b"", 1, PageFacts(*size, marks=100), "reading", "", 1.0)
    monkeypatch.setattr(
        "sensorium.pipelines.documents.printed_lines.run_isolated",
        lambda *_: SimpleNamespace(numpy=lambda: np.full((size[1], size[0], 3), 255, np.uint8)),
    )
    (record,) = reader.read([task], MediaPolicy(), StopSignal())
    return record


def test_pages_have_the_mean_of_their_words_and_are_doubted_below_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    good = read_page([0.999, 0.99, 0.7], monkeypatch)
    words = [word for block in good.blocks for line in block.lines for word in line.word_confidences]
    assert words == [round(calibrated(score), 4) for score in (0.999, 0.99, 0.7)]
    assert good.confidence == pytest.approx(sum(words) / 3, abs=1e-4)
    assert good.doubt is None
    fields = page_fields(good)
    assert fields["confidence"] == good.confidence
    assert fields["confidence_kind"] == fields["blocks"][0]["confidence_kind"] == "calibrated"
    assert fields["blocks"][0]["lines"][0]["word_confidences"] == (words[0],)
    bad = read_page([0.7, 0.7, 0.99], monkeypatch)  # their mean score, 0.8, is no sign of a wrong text by itself
    assert bad.confidence is not None
    assert bad.confidence < 0.5
    assert bad.doubt is not None


def test_words_of_models_have_the_probabilities_of_their_tokens() -> None:
    tokens = [("#", 0.0), (" Hel", math.log(0.5)), ("lo", math.log(0.5)), (" you", math.log(0.8)), ("\n\n", -9.0), ("5", -0.1)]
    blocks = (Block("heading", "Hello you", source="model"), Block("paragraph", "5", source="model"))
    scored, confidence = with_token_confidences(blocks, tokens)
    assert [block.confidence for block in scored] == pytest.approx([(0.25 + 0.8) / 2, math.exp(-0.1)], abs=0.01)
    assert confidence == pytest.approx((0.25 + 0.8 + math.exp(-0.1)) / 3, abs=0.01)
    fields = page_fields(PageRecord(1, blocks=scored, confidence=confidence))
    assert fields["confidence_kind"] == fields["blocks"][0]["confidence_kind"] == "token_probability"
    assert "confidence_kind" not in page_fields(PageRecord(1, blocks=blocks))
    assert with_token_confidences(blocks, []) == (blocks, None)
    (other,), none = with_token_confidences((Block("paragraph", "else", source="model"),), tokens)
    assert (other.confidence, none) == (None, None)


def test_the_fit_is_isotonic_and_counts_its_words() -> None:
    rng = np.random.default_rng(0)
    scores = rng.uniform(0, 1, 20_000)
    words = np.stack([scores, rng.uniform(0, 1, 20_000) < scores**3], axis=1)
    knots = fit(words)
    assert all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(knots))
    assert all(abs(share - score**3) < 0.08 for score, share in knots)
    assert fit(np.array([(1.0, 1.0)] * 500 + [(1.0, 0.0)] * 500)) == ((1.0, 0.5),)
    (low, high) = fit(np.array([(0.2, 1.0)] * 200 + [(0.3, 0.0)] * 200 + [(0.9, 1.0)] * 200))
    assert (low, high) == ((0.25, 0.5), (0.9, round(201 / 202, 4)))


def test_calibration_errors() -> None:
    sure, shares = np.array([0.05, 0.95, 0.85]), np.array([0.05, 0.75, 0.85])
    assert calibration_error(sure, shares, np.ones(3)) == pytest.approx(0.2 / 3)
    assert calibration_error(sure, shares, np.array([1.0, 2.0, 1.0])) == pytest.approx(0.1)


def test_words_are_right_where_the_page_has_them() -> None:
    words = tuple(TrueWord(text, x, y, 8) for text, x, y in (("one", 30, 10), ("two", 80, 10), ("one", 30, 50)))
    picture: Any = SimpleNamespace(words=words, matrix=np.diag([2.0, 2.0, 1.0]))

    def quad(left: float, top: float, right: float, bottom: float) -> list[tuple[float, float]]:
        return [(left / 2, top / 2), (right / 2, top / 2), (right / 2, bottom / 2), (left / 2, bottom / 2)]

    assert is_right(picture, quad(10, 2, 100, 18), ["one", "tvvo", "two"]) == [True, False, True]
    assert is_right(picture, quad(10, 2, 50, 18), ["one", "two"]) == [True, False]
    assert is_right(picture, quad(10, 80, 100, 96), ["one"]) == [False]
    assert words_of([ReadPicture("clean", (((0.5, True), (0.25, False)),))]).tolist() == [[0.5, 1.0], [0.25, 0.0]]


@pytest.mark.parametrize("condition", ["clean", "scanned", "photographed"])
def test_pictures_are_those_of_their_seed(condition: str) -> None:
    font = "dejavu/DejaVuSans.ttf"
    if not (FONTS / font).exists():
        pytest.skip("needs the fonts DejaVu")
    first, again = (picture_of(random.Random(5), condition, [font]) for _ in range(2))
    assert np.array_equal(first.pixels, again.pixels)
    assert first.words == again.words == draw_page(random.Random(5), [font], (11, 30))[1]
    word = first.words[0]
    x, y, w = np.linalg.inv(first.matrix) @ (word.x, word.y, 1.0)
    column, row = int(x / w), int(y / w)
    around = first.pixels[max(row - 4, 0) : row + 5, max(column - 8, 0) : column + 9]
    assert int(around.max()) - int(around.min()) > 40  # ink is there
