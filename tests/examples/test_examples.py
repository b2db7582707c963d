"""Every example runs as a user would start it, on the shipped model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import family
import pytest
import soundfile

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
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("a.png: '")
    assert done.stdout.count("\n") == done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: b.png: image 0: ")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("several_images", ["text.png"], "image 0: it is not in an image format"),
        ("several_images", ["nothing.png"], "'nothing.png' cannot be read"),
        ("one_image", ["--image", "nothing.png"], "'nothing.png' cannot be read"),
        ("streaming", ["--image", "nothing.png"], "'nothing.png' cannot be read"),
        ("video", ["--video", "nothing.mp4"], "'nothing.mp4' cannot be read"),
        ("ocr", ["nothing.png"], "error: nothing.png: image 0: "),
        ("folder_batch", ["nothing"], "nothing is not a folder"),
        ("folder_batch", ["empty"], "there are no images in empty"),
        ("transcribe", ["--model", "empty"], "name audio files"),
        ("transcribe", ["--model", "nowhere", "talk.flac"], "error: 'nowhere' is not a folder"),
        ("omni", ["--model", "nowhere"], "error: 'nowhere' is not a folder"),
        ("embed_and_rank", ["text.png"], "text.png: image 0: it is not in an image format"),
    ],
)
def test_what_is_not_there_is_said(name: str, words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    script = next(path for path in EXAMPLES if path.stem == name)
    done = subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["ocr", "embed_and_rank"])
def test_good_pictures_are_answered_beside_a_missing_one(name: str, tmp_path: Path) -> None:
    words = [str(FOLDER / f"{name}.py"), str(FOLDER.parent / "assets" / "media" / "line1.png"), "nothing.png"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("line1.png: ")
    assert done.stdout.count("\n") == done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: nothing.png: image 0: ")


def test_good_sounds_are_written_down_beside_a_missing_one(tmp_path: Path) -> None:
    family.save(family.load_rows()["whisper"], tmp_path / "whisper", max_target_positions=64)
    soundfile.write(tmp_path / "talk.flac", family.make_media("audio", (12_000,), 0), 16_000)
    words = [str(FOLDER / "transcribe.py"), "--model", "whisper", "--language", "en", "talk.flac", "nothing.flac"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("talk.flac (")
    assert done.stderr.startswith("error: nothing.flac: audio 0: ")


def test_several_images_shows_both() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "several_images.py")], capture_output=True, text=True, check=True)
    assert "line1.png: " in done.stdout
    assert "line2.png: " in done.stdout


def test_async_stream_says_whole_lines() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "async_stream.py")], capture_output=True, text=True, check=True)
    for name in ("receipt1", "receipt2"):
        first, *lines = (line for line in done.stdout.splitlines() if line.startswith(name))
        assert "first token after" in first
        assert lines[-1].startswith(f"{name}: TOTAL ")


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "transcribe"], ids=lambda path: path.stem)
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
