"""Ultravox: checkpoints that name other models, and trailing rows after the last window."""

from __future__ import annotations

import json
from pathlib import Path

import family
import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.mm.errors import CheckpointError, ConfigError

ELSEWHERE = {"audio_model_id": "a/tower", "text_model_id": "a/decoder"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return family.save(family.load_rows()["ultravox"], tmp_path / "ultravox")


def change(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


def test_a_checkpoint_that_names_other_models_holds_all_itself(folder: Path) -> None:
    change(folder, ELSEWHERE)
    LLM(folder, max_model_len=256).close()
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "language_model" not in name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*audio_model_id='a/tower', text_model_id='a/decoder'.: merge its"):
        LLM(folder, max_model_len=256)
    change(folder, {"text_config": None})
    with pytest.raises(ConfigError, match=r"text_config is in another model \(text_model_id='a/decoder'\); merge"):
        LLM(folder, max_model_len=256)


def test_trailing_rows_attend_and_are_not_attended_to(folder: Path) -> None:
    with LLM(folder, max_model_len=256) as llm:
        encoder = llm._engine_loop.core.runner.model.audio_tower
        audio, nothing = torch.randn(12, 24), torch.zeros(9, 24)
        with torch.inference_mode():
            (alone,) = encoder(audio, [12])
            both = encoder(torch.cat((audio, nothing, audio)), [12, 12], [4, None])
            other = encoder(torch.cat((audio + 1, nothing)), [12], [4])[0]
    assert [len(rows) for rows in both] == [10, 6]
    assert torch.equal(both[0][:6], alone)
    assert torch.equal(both[1], alone)
    assert not torch.isclose(other[6:], both[0][6:]).all(1).any()
