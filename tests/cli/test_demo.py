"""`sensorium demo` on the shipped model and media: what it prints and draws; accuracy is measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sensorium.cli import demo
from sensorium.cli.main import main
from sensorium.engine.setup.doctor import embedding_grid
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    names = list(json.loads((demo.ASSETS / "media" / "answers.json").read_text()))
    assert lines[0].split() == ["file", "answer", "expected", "ok"]
    assert [line.split()[0] for line in lines[1 : len(names) + 1]] == names
    assert all(line.split()[-1] in ("yes", "no") for line in lines[1 : len(names) + 1])
    assert "ms per stage" in out
    assert "prefill" in out
    assert not err  # no progress bar: stderr is not a terminal
    with Image.open(tmp_path / "demo.png") as sheet:
        assert sheet.height > 5 * 100


def test_output_folder_that_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    out, line = capsys.readouterr()
    assert not out
    assert line.startswith("sensorium: error: --out ")
    assert line.count("\n") == 1


def test_annotated_draws_the_grid() -> None:
    image = Image.new("RGB", (32, 48), "white")
    drawn = demo.annotated(image, (3, 2), "two\nlines")
    pixels = np.asarray(drawn)[: 48 * demo.ZOOM, : 32 * demo.ZOOM]
    red = (pixels != 255).any(-1)
    assert int(red.all(1).sum()) == 2
    assert int(red.all(0).sum()) == 1
    assert drawn.height > 48 * demo.ZOOM


def test_grid_of_the_shipped_model() -> None:
    assert embedding_grid(demo.ASSETS / "tiny-vl", (64, 96)) == (4, 6)


def test_shipped_media() -> None:
    folder = demo.ASSETS / "media"
    answers = demo.read_answers(folder)
    files = {path.name for path in folder.iterdir()} - {"answers.json"}
    assert files == set(answers)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000
    video = decode_video((folder / "clip.mp4").read_bytes(), FrameSampling(fps=2.0), MediaPolicy())
    assert tuple(video.frames.shape) == (8, 64, 64, 3)


def test_media_folder_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"a.mp4": {"prompt": "p", "answer": "a"}}))
    assert main(["demo", "--media", str(tmp_path)]) == 2
    assert "names no image" in capsys.readouterr().err
