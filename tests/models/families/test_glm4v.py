"""Layers of GLM-OCR behind the last, which predict further tokens, are kept; other surplus weights are named."""

from __future__ import annotations

from pathlib import Path

import family
import pytest
import torch
from family import load_rows
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.mm.errors import CheckpointError

MORE = {
    "enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128), "shared_head.norm.weight": (64,),
    "embed_tokens.weight": (640, 64), "self_attn.q_proj.weight": (64, 64),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return family.save(load_rows()["glm_ocr"], tmp_path)


def add(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    file = folder / "model.safetensors"
    more = {f"{prefix}{name}": torch.full(shape, 0.5) for name, shape in MORE.items()}
    save_file({**load_file(file), **more}, file)
    return more


def test_layers_for_further_tokens_are_kept(folder: Path) -> None:
    more = add(folder, "model.language_model.layers.3.")
    model = LLM(folder, device="cpu", max_model_len=256)._driver.core.runner.model
    assert {f"model.{name}" for name in model.spare} == more.keys()
    assert all(torch.equal(model.spare[name.removeprefix("model.")], tensor) for name, tensor in more.items())


def test_a_layer_that_no_count_explains_is_named(folder: Path) -> None:
    add(folder, "model.language_model.layers.4.")
    with pytest.raises(CheckpointError, match=r"layers\.4\."):
        LLM(folder, device="cpu", max_model_len=256)
