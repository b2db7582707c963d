"""Every example runs as a user would start it, on the shipped model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "shared")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_folder_batch_survives_a_broken_picture(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 32), "white").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    script = next(path for path in EXAMPLES if path.stem == "folder_batch")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("a.png: '")
    assert second.startswith("b.png: image 0: ")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("several_pictures", ["text.png"], "image 0: it is not in a picture format"),
        ("several_pictures", ["nothing.png"], "'nothing.png' cannot be read"),
        ("folder_batch", ["nothing"], "nothing is not a folder"),
        ("folder_batch", ["empty"], "there are no pictures in empty"),
        ("transcribe", ["--model", "empty"], "name sound files"),
        ("embed_and_rank", ["text.png"], "text.png: image 0: it is not in a picture format"),
    ],
)
def test_what_is_not_there_is_said(name: str, words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty").mkdir()
    script = next(path for path in EXAMPLES if path.stem == name)
    done = subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in ("omni", "transcribe")], ids=lambda path: path.stem
)
def test_a_model_that_is_not_there_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(path), "--model", "nowhere"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert err.count("\n") == 1
