"""The straight lines that pictures of pages show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from sensorium.mm.media import picture_rules as module
from sensorium.mm.media.page_rules import Rule
from sensorium.mm.media.picture_rules import picture_rules

HEIGHT = 24.0  # of the text's lines in pixels
WORDS = "The illuminated Titling LETTERS of HHH"


def page(*lines: Rule, width: int = 2, ink: int = 0, text_at: int | None = None) -> np.ndarray:
    image = Image.new("L", (800, 600), 255)
    pen = ImageDraw.Draw(image)
    for line in lines:
        pen.line(line, fill=ink, width=width)
    if text_at is not None:
        pen.text((60, text_at), WORDS, font=ImageFont.load_default(22), fill=0)
    return np.array(image)


def near(found: tuple[Rule, ...], expected: list[Rule], margin: float = 4) -> bool:
    """Return whether the lines are the expected ones, in any order."""

    def by_axis(rules: Sequence[Rule]) -> list[Rule]:
        return sorted(rules, key=lambda rule: (rule[1] == rule[3], rule[0] + rule[1]))

    pairs = zip(by_axis(found), by_axis(expected), strict=True)
    return all(abs(a - b) <= margin for rule, other in pairs for a, b in zip(rule, other, strict=True))


GRID: list[Rule] = [*((100, y, 500, y) for y in (100, 200, 300)), *((x, 100, x, 300) for x in (100, 300, 500))]


@pytest.mark.parametrize(("width", "ink"), [(1, 0), (2, 0), (4, 0), (2, 120), (2, 190)])
def test_lines_of_a_table(width: int, ink: int) -> None:
    assert near(picture_rules(page(*GRID, width=width, ink=ink), HEIGHT), GRID)


def test_strokes_of_letters_are_no_lines() -> None:
    shown = page(*GRID, text_at=400)
    box = (56.0, 398.0, 500.0, 428.0)
    assert near(picture_rules(shown, HEIGHT, [box]), GRID)
    large = Image.new("L", (800, 600), 255)
    ImageDraw.Draw(large).text((60, 100), "THE TITLE", font=ImageFont.load_default(110), fill=0)
    box = (50.0, 100.0, 700.0, 230.0)
    assert picture_rules(np.asarray(large), HEIGHT, [box]) == ()


def test_broken_tilted_and_noisy_lines() -> None:
    shown = Image.fromarray(page(*GRID)).rotate(0.25, Image.Resampling.BICUBIC, fillcolor=255)
    noisy = np.asarray(shown, np.float32) * 0.9 + np.random.default_rng(1).normal(0, 8, (600, 800))
    assert near(picture_rules(noisy.clip(0, 255).astype(np.uint8), HEIGHT), GRID, margin=6)
    broken = page(*GRID)
    broken[:, 200:202] = 255
    assert near(picture_rules(broken, HEIGHT), GRID)


def test_filled_areas_are_no_lines() -> None:
    shown = page(*GRID)
    shown[350:450, 100:500] = 0  # a picture
    shown[210:290, 310:490] = 200  # a shaded cell
    assert near(picture_rules(shown, HEIGHT), GRID)


def test_large_pictures_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SIDE", 400)
    assert near(picture_rules(page(*GRID, width=4), HEIGHT), GRID, margin=6)


def hostile(name: str) -> np.ndarray:
    if name == "noise":
        return np.random.default_rng(0).integers(0, 256, (600, 800), np.uint8)
    shown = np.full((600, 800), 255, np.uint8)
    if name == "stripes":
        shown[::4] = 0
    elif name == "squares":
        shown[::2, ::2] = shown[1::2, 1::2] = 0
    elif name == "lattice":
        shown[::8] = shown[:, ::8] = 0
    elif name == "black":
        shown[:] = 0
    return shown


@pytest.mark.parametrize("name", ["noise", "stripes", "squares", "lattice", "black", "white"])
@pytest.mark.parametrize("height", [0.01, HEIGHT, 1e6])
def test_hostile_pictures_have_few_lines(name: str, height: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RULES", 100)
    assert len(picture_rules(hostile(name), height)) <= 100


def test_a_picture_of_very_many_lines_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RULES", len(GRID) - 1)
    assert picture_rules(page(*GRID), HEIGHT) == ()


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1)])
def test_tiny_pictures(shape: tuple[int, int]) -> None:
    assert picture_rules(np.zeros(shape, np.uint8), HEIGHT) == ()
