"""docs/inputs.md runs as it stands, block after block."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from oracle import build_checkpoint
from PIL import Image
from sensorium import LLM

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    picture.save(tmp_path / "cat.jpg")
    picture.save(tmp_path / "chart.png")
    shutil.copy(ROOT / "assets" / "media" / "clip.mp4", tmp_path / "clip.mp4")
    soundfile.write(tmp_path / "sound.wav", np.sin(np.arange(4000) / 9), 8000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inputs(folder: Path, checkpoint: Path, tmp_path: Path):
    blocks = BLOCK.findall((ROOT / "docs" / "inputs.md").read_text("utf-8"))
    assert len(blocks) >= 10
    speech = LLM(build_checkpoint(tmp_path / "speech", "qwen2_audio"), max_model_len=512)
    chart = base64.b64encode((folder / "chart.png").read_bytes()).decode()
    names = {"llm": LLM(checkpoint, max_model_len=512), "speech": speech, "PNG_BASE64": chart}
    names["WIDTH"] = names["llm"]._driver.core.runner.model.hidden_size
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/inputs.md block {number}", "exec"), names)
