"""`sensorium ocr` with the shipped model and images: text, JSON, exit codes."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED_MODEL

MEDIA = SHIPPED_MODEL.parent / "media"
LINES = [str(MEDIA / f"line{number}.png") for number in (1, 2, 3)]
URLS = [Path(LINES[0]).as_uri(), "data:image/png;base64," + b64encode(Path(LINES[0]).read_bytes()).decode()]
ANSWERS = json.loads((MEDIA / "answers.json").read_text("utf-8"))


def test_text_of_one_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", str(MEDIA / "receipt1.png"), "--question", "Read the receipt."]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWERS["receipt1.png"]["answer"] + "\n"
    assert not err  # no progress bar: stderr is not a terminal


def test_several_in_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken image fails alone."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert main(["ocr", LINES[0], str(tmp_path / "broken.png"), *LINES[1:]]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{path}: {ANSWERS[Path(path).name]['answer']}" for path in LINES]
    assert f"sensorium: error: {tmp_path / 'broken.png'}: it is " in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", *LINES, "--json", "--max-tokens", "16"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [
        {"file": path, "text": ANSWERS[Path(path).name]["answer"], "finish_reason": "stop", "error": None} for path in LINES
    ]


def test_warning_for_a_truncated_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", LINES[0], "--json", "--max-tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finish_reason"] == "length"
    assert err == f"sensorium: warning: the text of {LINES[0]} was cut off at the token limit; raise --max-tokens\n"


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", "nothing.png"]) == 2
    assert "nothing.png" in capsys.readouterr().err


def test_llm_ocr_takes_every_form_of_image() -> None:
    from PIL import Image
    from sensorium import LLM, Media

    with Image.open(LINES[0]) as image:
        forms = [LINES[0], Path(LINES[0]), Path(LINES[0]).read_bytes(), image.convert("RGB"), *URLS, Media(LINES[0], "line")]
    llm = LLM(SHIPPED_MODEL)
    assert {page.text for page in llm.ocr([*forms, Media(None, "line")])} == {ANSWERS["line1.png"]["answer"]}
    assert [page.text for page in llm.ocr(forms[3], use_tqdm=False)] == [ANSWERS["line1.png"]["answer"]]
    whole, small = (llm.ocr(one)[0].output for one in (LINES[0], Media(LINES[0], max_pixels=3000)))
    assert small.items[0].num_tokens < whole.items[0].num_tokens


def test_data_urls_are_shortened_in_output(capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"data:image/png;base64,{'A' * 400}"
    assert main(["ocr", *URLS, broken]) == 2
    out, err = capsys.readouterr()
    assert [line.rpartition(": ")[2] for line in out.splitlines()] == [ANSWERS["line1.png"]["answer"]] * 2
    assert err.startswith("sensorium: error: data:image/png;base64,AAAAAAAAAAAAAAAAAA...: ")
    assert "A" * 20 not in out + err
    assert main(["ocr", "A" * 100_000]) == 2
    assert len(capsys.readouterr().err) < 5000
