"""The shipped model: transformers loads it and gives the same answers, most of which are right."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sensorium import LLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
MODEL = ROOT / "assets" / "tiny-vl"

from training.data import FACES, UNSEEN_FACE, Sample, held_out  # noqa: E402
from training.evaluate import Transformers, edits, ours, score  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL)


@pytest.fixture(scope="module")
def oracle() -> Transformers:
    return Transformers(MODEL)


@pytest.mark.parametrize(("kind", "count", "least"), [("text", 12, 0.9), ("receipt", 4, 0.85), ("clip", 12, 0.75)])
def test_same_answers_as_transformers(kind: str, count: int, least: float, llm: LLM, oracle: Transformers) -> None:
    samples = held_out(kind, count)
    answers = ours(llm, samples)
    assert answers == [oracle(sample) for sample in samples]
    assert score(samples, answers) >= least


def test_answers_depend_on_the_image(llm: LLM) -> None:
    samples = held_out("text", 6)
    swapped = [Sample("text", other.pixels, sample.answer) for sample, other in zip(samples, samples[::-1], strict=True)]
    assert ours(llm, swapped) == ours(llm, samples)[::-1]
    assert score(swapped, ours(llm, swapped)) < 0.5


def test_answers_depend_on_the_order_of_frames(llm: LLM) -> None:
    samples = held_out("clip", 12)
    reversed_videos = [Sample("clip", np.ascontiguousarray(s.pixels[::-1]), s.answer) for s in samples]
    assert score(reversed_videos, ours(llm, reversed_videos)) < 0.5


def test_held_out_sets_are_fixed() -> None:
    assert UNSEEN_FACE not in FACES
    assert [s.answer for s in held_out("text", 3)] == [s.answer for s in held_out("text", 3)]
    assert held_out("text", 3)[0].answer == "IZB5FXI71"


def test_checkpoint_is_small_and_complete() -> None:
    size = sum(file.stat().st_size for file in MODEL.iterdir())
    assert size <= 12 * 2**20
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= {file.name for file in MODEL.iterdir()}


@pytest.mark.parametrize(("a", "b", "distance"), [("", "AB", 2), ("ABC", "AXC", 1), ("ABC", "BC", 1), ("KITTEN", "SITTING", 3)])
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edits(a, b) == distance
