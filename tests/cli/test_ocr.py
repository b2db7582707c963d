"""`sensorium ocr` with the model that ships: the shipped pictures are read, text and JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED

MEDIA = SHIPPED.parent / "media"
LINES = [str(MEDIA / f"line{number}.png") for number in (1, 2, 3)]
ANSWERS = json.loads((MEDIA / "answers.json").read_text("utf-8"))


def test_one_picture_is_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", str(MEDIA / "receipt1.png"), "--question", "Read the receipt."]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWERS["receipt1.png"]["answer"] + "\n"
    assert "1/1" in err  # the progress bar


def test_several_in_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is broken fails alone."""
    (tmp_path / "broken.png").write_bytes(b"no picture")
    assert main(["ocr", LINES[0], str(tmp_path / "broken.png"), *LINES[1:]]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{path}: {ANSWERS[Path(path).name]['answer']}" for path in LINES]
    assert f"sensorium: error: {tmp_path / 'broken.png'}: image 0: " in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", *LINES, "--json", "--max-tokens", "16"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"file": path, "text": ANSWERS[Path(path).name]["answer"], "error": None} for path in LINES]


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", "nothing.png"]) == 2
    assert "nothing.png" in capsys.readouterr().err


def test_python_takes_any_form_of_picture() -> None:
    from PIL import Image
    from sensorium import LLM

    with Image.open(LINES[0]) as picture:
        forms = [LINES[0], Path(LINES[0]), Path(LINES[0]).read_bytes(), picture.convert("RGB")]
    llm = LLM(SHIPPED)
    assert {page.text for page in llm.ocr(forms, use_tqdm=False)} == {ANSWERS["line1.png"]["answer"]}
    assert [page.text for page in llm.ocr(forms[3], use_tqdm=False)] == [ANSWERS["line1.png"]["answer"]]
