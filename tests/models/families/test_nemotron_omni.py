"""Tensors that only some checkpoints of Nemotron 3 Omni store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family import load_rows
from oracle import save_checkpoint
from safetensors.torch import load_file
from sensorium.models.families.nemotron_omni.model import NemotronOmni
from torch import Tensor


def saved(folder: Path, **variant: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a checkpoint."""
    model, processor = load_rows()["nemotron_omni"].build(0, **variant)
    save_checkpoint(folder, model, processor)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def loaded(config: dict[str, Any], tensors: dict[str, Tensor]) -> NemotronOmni:
    model = NemotronOmni(config, torch.float32, torch.device("cpu"))
    model.choose_head(tensors)
    model.check_weights(tensors)
    model.load_weights(tensors.items())
    return model


def test_a_norm_that_is_not_stored_has_weights_of_one(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path, num_nextn_predict_layers=1)
    name = "vision_final_layernorm"
    others = {key: tensor for key, tensor in tensors.items() if name not in key}
    width = len(tensors[f"{name}.weight"])
    parts = {"weight": torch.ones(width), "bias": torch.zeros(width)}
    rows = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    without = loaded(config, others).project(rows)
    for prefix in ("", "vision_projector."):
        stored = {f"{prefix}{name}.{part}": tensor for part, tensor in parts.items()}
        assert torch.allclose(loaded(config, {**others, **stored}).project(rows), without, rtol=0, atol=1e-5)
    assert not torch.allclose(loaded(config, tensors).project(rows), without, rtol=0, atol=1e-2)


def test_biases_of_convolutions_without_biases_are_not_used(tmp_path: Path) -> None:
    config, tensors = saved(tmp_path)
    config["audio_config"]["convolution_bias"] = False
    inputs = {"input_features": torch.ones(16, 16), "audio_frames": torch.tensor([16])}
    rows = loaded(config, tensors).embed_multimodal("audio", inputs)[0]
    kept = {
        key: tensor
        for key, tensor in tensors.items()
        if not (".conv." in key and "conv" in key.split(".")[-2] and "bias" in key)
    }
    assert len(kept) < len(tensors)
    assert torch.equal(loaded(config, kept).embed_multimodal("audio", inputs)[0], rows)
