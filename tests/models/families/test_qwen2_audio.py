"""Qwen2-Audio beyond the parity suite: the published config, and refused configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import build_checkpoint
from sensorium.callers.errors import ConfigError
from sensorium.engine.model_files import load_model_files
from sensorium.models.families.qwen2_audio.model import Qwen2Audio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_audio", "qwen2_audio")


def test_the_published_config_leaves_sizes_out() -> None:
    model = Qwen2Audio({"text_config": {"vocab_size": 156_032}, "audio_config": {}}, torch.float16, torch.device("meta"))
    assert (model.vocab_size, model.hidden_size, model.rope_axes, len(model.cache_specs)) == (156_032, 4096, 1, 32)
    assert (model.audio_tower.config.width, model.audio_tower.config.mels, len(model.audio_tower.layers)) == (1280, 128, 32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"activation_function": "prelu"}, "parameters of its own"),
        ({"encoder_attention_heads": 7}, "d_model 64 is not a multiple"),
        ({"encoder_layers": 0}, "encoder_layers in config.json is 0"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], text: str, folder: Path) -> None:
    config = load_model_files(folder).config
    with pytest.raises(ConfigError, match=text):
        Qwen2Audio(config | {"audio_config": config["audio_config"] | change}, torch.float32, torch.device("cpu"))
