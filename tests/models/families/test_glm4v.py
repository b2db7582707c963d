"""GLM-OCR: layers for multi-token prediction are ignored; other surplus weights are refused by name."""

from __future__ import annotations

from pathlib import Path

import family
import pytest
import torch
from family import load_rows
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError

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


def test_multi_token_prediction_layers_are_ignored(folder: Path) -> None:
    options = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    (plain,) = LLM(folder, device="cpu", max_model_len=256).generate(prompt, options, use_tqdm=False)
    add(folder, "model.language_model.layers.3.")
    (with_layers,) = LLM(folder, device="cpu", max_model_len=256).generate(prompt, options, use_tqdm=False)
    assert with_layers.outputs[0].token_ids == plain.outputs[0].token_ids
    assert with_layers.outputs[0].logprobs == plain.outputs[0].logprobs


def test_surplus_layers_beyond_the_stated_number_are_refused(folder: Path) -> None:
    add(folder, "model.language_model.layers.4.")
    with pytest.raises(CheckpointError, match=r"layers\.4\."):
        LLM(folder, device="cpu", max_model_len=256)
