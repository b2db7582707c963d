"""Scans of two pages side by side, which a model reads one after the other."""

from __future__ import annotations

import random
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from scripted_model import ScriptedModel
from sensorium.mm.media.page_facts import PageFacts
from sensorium.mm.media.policy import DEFAULT_POLICY
from sensorium.pipelines.documents import readers
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.readers import ModelReader
from sensorium.pipelines.documents.spreads import gutter_of
from sensorium.pipelines.documents.stop import StopSignal

WIDTH, HEIGHT = 1400, 1000
WORDS = ("report", "year", "shows", "that", "prices", "regions", "have", "risen", "by", "about", "four", "percent")


def page_picture(left: int, right: int, kind: str, image: Image.Image) -> None:
    """Draw lines of text, or of a table with two columns, between two places."""
    pen, font, rng = ImageDraw.Draw(image), ImageFont.load_default(20), random.Random(left)
    for top in range(100, HEIGHT - 120, 32):
        if kind == "table":
            pen.text((left, top), rng.choice(WORDS), font=font, fill=20)
            pen.text((right - 100, top), str(rng.randint(100, 99999)), font=font, fill=20)
            continue
        text = rng.choice(WORDS)
        while font.getlength(longer := f"{text} {rng.choice(WORDS)}") < right - left:
            text = longer
        pen.text((left, top), text, font=font, fill=20)


def spread(kind: str = "text") -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), (248, 246, 240))
    if kind == "one page":
        page_picture(80, WIDTH - 80, "text", image)
        return image
    page_picture(80, 640, kind, image)
    page_picture(760, 1320, kind, image)
    if kind == "title":
        ImageDraw.Draw(image).text((500, 40), "A title that stands over both columns", font=ImageFont.load_default(28), fill=20)
    if kind == "fold":
        ImageDraw.Draw(image).rectangle((694, 0, 706, HEIGHT), fill=(60, 60, 60))
        image = image.filter(ImageFilter.GaussianBlur(2))
    return image


@pytest.mark.parametrize(
    ("kind", "is_spread"), [("text", True), ("fold", True), ("title", False), ("table", False), ("one page", False)]
)
def test_pages_that_are_divided(kind: str, is_spread: bool) -> None:
    gutter = gutter_of(np.asarray(spread(kind)))
    assert (gutter is not None) is is_spread
    if gutter is not None:
        assert 640 < gutter < 760


def test_noise_does_not_hide_the_gutter_and_tall_pages_have_none() -> None:
    noisy = np.asarray(spread(), np.float32) + np.random.default_rng(1).normal(0, 6, (HEIGHT, WIDTH, 3))
    pixels = noisy.clip(0, 255).astype(np.uint8)
    assert gutter_of(pixels) is not None
    assert gutter_of(np.ascontiguousarray(np.rot90(pixels))) is None
    assert gutter_of(np.full((500, 700, 3), 255, np.uint8)) is None


def test_both_pages_are_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "find_lines_reader", lambda name: None)
    file = BytesIO()
    spread().save(file, "PNG")
    box = '[{"bbox_2d": [0, 100, 500, 200], "label": "text", "text": "%s page"}]'
    model = ScriptedModel({"Read.": [box % "left", box % "right"]}, (), "resized_json", (HEIGHT, 700), (HEIGHT, 700))
    reader = ModelReader(model, ReadOptions(question="Read.", max_tokens=64), run=model.run)  # type: ignore[arg-type]
    task = PageTask(file.getvalue(), 1, PageFacts(WIDTH / 2, HEIGHT / 2, marks=2000), "reading", "", 2.0)
    (record,) = reader.read([task], DEFAULT_POLICY, StopSignal())
    (_, first), (_, second) = model.requests
    assert first["image"].shape[1] + second["image"].shape[1] == WIDTH
    assert [block.text for block in record.blocks] == ["left page", "right page"]
    gutter = first["image"].shape[1]
    assert [block.box for block in record.blocks] == [
        (0, 50, 250, 100), (gutter / 2, 50, 250 + gutter / 2, 100),
    ]  # fmt: skip
    assert model.drafts == ["", ""]
