"""VibeVoice-ASR in its publisher's layout: other keys of config.json, other names of tensors, a decoder of sounds."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import family
import pytest
import torch
from parity import make_llm, record
from safetensors.torch import load_file, save_file
from sensorium.callers.errors import ConfigError
from sensorium.models.families.vibevoice_asr.config import hub_config
from sensorium.models.families.vibevoice_asr.model import wave_encoder_spec

ROW = family.load_rows()["vibevoice_asr"]


def published_name(name: str) -> str:
    """Return the publisher's name of a tensor in the Hub's layout."""
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head.", "lm_head.")
    name = name.removeprefix("model.") if "tokenizer_encoder" in name or "projector" in name else name
    name = re.sub(r"^multi_modal_projector\.(\w+?)_linear_(\d)\.", r"model.\1_connector.fc\2.", name)
    name = re.sub(r"^multi_modal_projector\.(\w+?)_norm\.", r"model.\1_connector.norm.", name)
    name = re.sub(r"^(\w+?)_tokenizer_encoder\.", r"model.\1_tokenizer.encoder.", name)
    name = name.replace(".mixer.conv.", ".mixer.conv.conv.conv.").replace(".head.conv.", ".head.conv.conv.")
    name = name.replace(".stem.conv.conv.", ".downsample_layers.0.0.conv.conv.").replace(".stem.stage.", ".stages.0.")
    name = re.sub(r"\.conv_layers\.(\d+)\.conv\.", lambda m: f".downsample_layers.{int(m[1]) + 1}.0.conv.", name)
    return re.sub(r"\.conv_layers\.(\d+)\.stage\.", lambda m: f".stages.{int(m[1]) + 1}.", name)


def published_encoder(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "vae_dim": config["hidden_size"],
        "encoder_n_filters": config["num_filters"],
        "encoder_ratios": config["downsampling_ratios"][::-1],
        "encoder_depths": "-".join(map(str, config["depths"])),
        "layernorm_eps": config["rms_norm_eps"],
        "mixer_layer": "depthwise_conv",
    }


def test_the_publishers_layout(tmp_path: Path) -> None:
    hub = family.save(ROW, tmp_path / "hub")
    published = tmp_path / "published"
    shutil.copytree(hub, published)
    config, tensors = json.loads((hub / "config.json").read_text()), load_file(hub / "model.safetensors")
    encoders = {
        f"{kind}_tokenizer_config": published_encoder(config[f"{kind}_tokenizer_encoder_config"])
        for kind in ("acoustic", "semantic")
    }
    other = {"architectures": ["VibeVoiceForASRTraining"], "model_type": "vibevoice", "decoder_config": config["text_config"]}
    other |= {"audio_token_id": config["audio_token_id"], **encoders}
    (published / "config.json").write_text(json.dumps(other))
    (published / "preprocessor_config.json").write_text(json.dumps({"target_sample_rate": 24_000, "normalize_audio": True}))
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    assert "model.acoustic_tokenizer.encoder.downsample_layers.2.0.conv.conv.weight" in renamed
    unused = {"model.acoustic_tokenizer.decoder.stages.0.0.gamma": torch.ones(3)}
    save_file(renamed | unused, published / "model.safetensors", {"format": "pt"})
    question = family.ask(ROW, "aa", 1)
    expected, found = (record(make_llm(ROW, folder), question, 1)[1] for folder in (hub, published))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "change", [{"mixer_layer": "conv"}, {"encoder_depths": "3-x"}, {"encoder_ratios": 5}, {"causal": False}, "none"]
)
def test_other_encoders_are_refused(change: Any) -> None:
    with pytest.raises(ConfigError):
        hub_config({"acoustic_tokenizer_config": {}, "semantic_tokenizer_config": change})


@pytest.mark.parametrize("section", [[1], {"depths": 5}, {"downsampling_ratios": None}, {"depths": [1]}, {"channels": 2}])
def test_sections_of_other_forms_are_refused(section: Any) -> None:
    with pytest.raises(ConfigError):
        wave_encoder_spec({"acoustic_tokenizer_encoder_config": section}, "acoustic")
