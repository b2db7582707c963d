"""Calibrations of confidences that are fitted to pages with known texts, and their use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sensorium.callers.errors import InputError
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED_MODEL
from sensorium.pipelines.documents import fit_calibration as module
from sensorium.pipelines.documents import readers
from sensorium.pipelines.documents.blocks import Block, Line, PageRecord
from sensorium.pipelines.documents.confidence import Calibration, load_calibration
from sensorium.pipelines.documents.fit_calibration import FittedCalibration, fit, scored_words

from benchmarks.model_confidence import draw_page, write_pages

MEDIA = SHIPPED_MODEL.parent / "media"
FITTED = {"reader": "tiny-vl", "question": "Read the receipt.", "knots": [[0.2, 0.1], [0.9, 0.7]]}


def test_words_are_right_in_the_order_of_the_text() -> None:
    lines = (Line("one two", None, 0.5, (0.5, 0.6)), Line("six", None))
    blocks = (
        Block("paragraph", "one two six", lines=lines, source="reader"),
        Block("paragraph", "**three** f0ur `five`", text_format="markdown", word_confidences=(0.7, 0.8, None), source="model"),
        Block("picture", ""),
    )
    words = list(scored_words(PageRecord(1, blocks=blocks), "two one six three four five"))
    assert words == [(0.5, True), (0.6, False), (0.7, True), (0.8, False)]


def test_errors_are_those_of_pages_that_the_fit_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.5, 1, (40, 50))
    rights = rng.uniform(0, 1, scores.shape) < scores**4
    pages = tuple(np.stack(pair, axis=1).astype(float) for pair in zip(scores, rights, strict=True))
    fitted = FittedCalibration(Calibration(fit(np.concatenate(pages))), pages)
    before, after = fitted.errors
    assert before > 0.2
    assert 0 < after < 0.06
    assert fitted.calibration(0.75) == pytest.approx(0.75**4, abs=0.1)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, "invalid_input", "cannot be read: No such file"),
        ("{", "invalid_value", "is no calibration"),
        ("[1]", "invalid_value", "is no calibration"),
        (json.dumps(FITTED | {"knots": []}), "invalid_value", "is no calibration"),
        (json.dumps(FITTED | {"knots": [[0.5, 0.2], [0.4, 0.3]]}), "invalid_value", "is no calibration"),
        (json.dumps(FITTED | {"knots": [[0.5, 1.2]]}), "invalid_value", "is no calibration"),
        (json.dumps(FITTED | {"reader": "other"}), "invalid_value", "was fitted to 'other: Read the receipt.'"),
        (json.dumps(FITTED | {"question": "Read."}), "invalid_value", "was fitted to 'tiny-vl: Read.'"),
    ],
)
def test_files_that_are_no_calibration_of_the_model(tmp_path: Path, content: str | None, code: str, message: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_calibration(tmp_path / "a.json", "tiny-vl", "Read the receipt.")
    assert (caught.value.info.code, caught.value.info.param) == (code, "calibration")


def read(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = main(["read", str(MEDIA / "receipt2.png"), "--model", str(SHIPPED_MODEL), "--format", "json", *words])
    return (code, json.loads(out)["pages"][0]) if (out := capsys.readouterr().out) else (code, None)


def test_a_model_is_calibrated_on_pages_with_known_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_WORDS", 8)
    monkeypatch.setattr(readers, "find_lines_reader", lambda name: None)
    folder, path = tmp_path / "pages", tmp_path / "calibration.json"
    folder.mkdir()
    answers = json.loads((MEDIA / "answers.json").read_text())
    for name in ("receipt1", "receipt2"):
        shutil.copy(MEDIA / f"{name}.png", folder)
        (folder / f"{name}.txt").write_text(answers[f"{name}.png"]["answer"].replace("TOTAL", "TOTAI"))
    words = ["read", str(folder), "--model", str(SHIPPED_MODEL), "--question", "Read the receipt."]
    assert main([*words, "--fit-calibration", str(path)]) == 0
    assert "12 of 14 words are right" in capsys.readouterr().out
    values = json.loads(path.read_text())
    assert {key: values[key] for key in ("reader", "question", "pages", "words", "right")} == {
        "reader": "tiny-vl",
        "question": "Read the receipt.",
        "pages": 2,
        "words": 14,
        "right": 12,
    }
    path.write_text(json.dumps(FITTED))
    code, page = read(capsys, "--question", "Read the receipt.")
    _, calibrated = read(capsys, "--question", "Read the receipt.", "--calibration", str(path))
    (before,), (after,) = page["blocks"], calibrated["blocks"]
    assert (code, before["text"]) == (0, after["text"])
    kinds = [page["confidence_kind"] for page in (page, calibrated, before, after)]
    assert kinds == ["token_probability", "calibrated"] * 2
    assert len(before["word_confidences"]) == len(before["text"].split()) == 8
    curve = Calibration(((0.2, 0.1), (0.9, 0.7)))
    assert after["word_confidences"] == pytest.approx([curve(score) for score in before["word_confidences"]], abs=0.002)
    assert calibrated["confidence"] == pytest.approx(np.mean(after["word_confidences"]), abs=0.01)
    assert read(capsys, "--calibration", str(path)) == (2, None)  # it was fitted to another question


def test_pages_without_a_right_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(MEDIA / "receipt1.png", tmp_path / "a.png")
    words = ["read", str(tmp_path), "--model", str(SHIPPED_MODEL), "--fit-calibration"]
    assert main([*words, str(tmp_path / "out.json")]) == 2
    assert "a.txt': No such file or directory" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("ICG4 114")
    assert main([*words, str(tmp_path / "out.json")]) == 2
    assert "give two pages or more, with 200 words" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_pages_of_the_benchmark_are_those_of_their_seed(tmp_path: Path) -> None:
    write_pages(tmp_path, "noisy", 2, 5)
    first, again = ((tmp_path / "noisy-0001.png").read_bytes() for _ in range(2) if not write_pages(tmp_path, "noisy", 2, 5))
    assert first == again
    picture, text = draw_page(np.random.default_rng(1), "clean")
    assert text.splitlines()[-1].startswith("TOTAL ")
    assert min(picture.size) >= 32
