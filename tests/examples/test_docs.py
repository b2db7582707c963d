"""Run the code blocks of README.md, docs/inputs.md, sampling.md and speech.md in order."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import family
import numpy as np
import pytest
import soundfile
from oracle import build_checkpoint
from PIL import Image
from sensorium import LLM, Media, SamplingParams
from sensorium.cli import main as cli
from sensorium.processors.text import message_parts
from speaker_files import save_networks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    image.save(tmp_path / "cat.jpg")
    image.save(tmp_path / "chart.png")
    shutil.copy(ROOT / "assets" / "media" / "clip.mp4", tmp_path / "clip.mp4")
    soundfile.write(tmp_path / "speech.wav", np.sin(np.arange(4000) / 9), 8000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inputs(folder: Path, checkpoint: Path, tmp_path: Path):
    blocks = BLOCK.findall((ROOT / "docs" / "inputs.md").read_text("utf-8"))
    assert len(blocks) >= 10
    speech = LLM(build_checkpoint(tmp_path / "speech", "qwen2_audio"), max_model_len=512)
    chart = base64.b64encode((folder / "chart.png").read_bytes()).decode()
    names = {"llm": LLM(checkpoint, max_model_len=512), "speech": speech, "PNG_BASE64": chart}
    names["WIDTH"] = names["llm"].engine.loop.core.executor.runner.model.hidden_size
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/inputs.md block {number}", "exec"), names)


def test_every_part_and_option_of_messages_is_documented():
    text = (ROOT / "docs" / "inputs.md").read_text("utf-8")
    names = {
        *message_parts.PART_TYPES,
        *message_parts.FILE_TYPES,
        *(name for several in message_parts._OPTIONS.values() for name in several),
    }
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Every block of Python and of the command line prints the text block below it."""
    text = (ROOT / "README.md").read_text("utf-8")
    for name in ("assets", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.S)
    assert len(blocks) == len(BLOCK.findall(text)) == 3
    names: dict = {}
    for number, (block, expected) in enumerate(blocks):
        exec(compile(block, f"README.md block {number}", "exec"), names)
        assert capsys.readouterr().out.strip() == expected.strip()
    (console,) = re.findall(r"```console\n(.*?)```", text, re.S)
    commands = re.findall(r"^\$ sensorium (.*)\n((?:[^$].*\n)*)", console, re.M)
    assert len(commands) == console.count("$ ")
    for command, expected in commands:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out.strip() == expected.strip()


@pytest.mark.parametrize("plain", [Media, SamplingParams])
def test_an_unknown_keyword_is_a_type_error(plain: type):
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_pixel'"):
        plain(max_pixel=1)


def test_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for number, block in enumerate(BLOCK.findall((ROOT / "docs" / "sampling.md").read_text("utf-8"))):
        exec(compile(block, f"docs/sampling.md block {number}", "exec"), names)
        assert names["output"].error is None
        answer = names["output"].outputs[0]
        if number == 0:
            assert json.loads(answer.text).keys() == {"total", "paid"}
        if number == 2:
            assert set(names["spaces"]).isdisjoint(answer.token_ids)
    assert number == 4
    assert (names["spaces"][0],) * 2 not in pairwise(answer.token_ids), "the loop is forbidden after its repair"


def test_speech(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family.save(family.load_rows()["whisper"], tmp_path / "whisper-tiny", max_target_positions=64)
    for number, name in enumerate(("talk.flac", "call.wav", "interview.flac", "meeting.flac")):
        soundfile.write(tmp_path / name, family.make_media("audio", (12_000,), number), 16_000)
    save_networks(tmp_path / "networks")
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    shutil.copy(ROOT / "assets" / "media" / "receipt1.png", tmp_path / "receipt.png")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for number, block in enumerate(BLOCK.findall((ROOT / "docs" / "speech.md").read_text("utf-8"))):
        block = block.replace("speakers=True", "speakers=True, speaker_model='networks'")  # without the packages of weights
        exec(compile(block, f"docs/speech.md block {number}", "exec"), names)
    assert names["transcript"].error is names["english"].error is names["output"].error is None
    assert names["transcript"].segments is not None
    assert "TOTAL" in names["page"].text
