"""Llama-Nemotron-Rerank-VL: classes of prompts with texts and images, in the publisher's layout; configs of its embedder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedder import load_embedders
from family import make_media
from oracle import save_checkpoint
from safetensors.torch import load_file, save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import ConfigError
from sensorium.models.families.nemotron_embed.model import NemotronEmbed
from sensorium.models.families.nemotron_embed.processing import NemotronEmbedProcessingInfo
from sensorium.processors.files import ProcessorFiles

ROW = load_embedders()["nemotron_embed"]
LABELS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "embedder", *ROW.build(0))


def test_classes_of_prompts(folder: Path, tmp_path: Path) -> None:
    """The reranker stores the embedder's tensors under `model.`, and a linear layer over the mean of all states."""
    model, processor = ROW.load(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaNemotronVLForSequenceClassification"], "num_labels": LABELS}
    score = torch.randn(LABELS, config["llm_config"]["hidden_size"], generator=torch.Generator().manual_seed(5))
    stored = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    processor.save_pretrained(tmp_path)
    save_file({**stored, "score.weight": score}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    image, texts = make_media("image", (90, 130), 0), ["question: import os passage: def f(x): return x", "a house"]
    pages = [{"prompt": "<IMG_CONTEXT>", "multi_modal_data": {"image": image}}]
    with LLM(tmp_path, max_num_seqs=4, max_model_len=1024) as llm:
        found = llm.encode([*texts, *pages], PoolingParams(task="classify", use_activation=False), use_tqdm=False)
    for one, item in zip(found, [*texts, image], strict=True):
        kept = dict[str, torch.Tensor]()
        hook = model.language_model.register_forward_hook(lambda _, __, out, kept=kept: kept.update(x=out.last_hidden_state))
        with torch.inference_mode():
            model(**ROW.inputs(processor, item))
        hook.remove()
        torch.testing.assert_close(one.outputs.data, kept["x"][0].mean(0) @ score.T, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("change", "pooling"), [({}, "mean"), ({"pooling": "last"}, "last"), ({"pooling": "cls"}, "cls")])
def test_the_config_names_the_pooling(change: dict[str, Any], pooling: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert NemotronEmbed({**config, **change}, torch.float32, torch.device("meta")).pooling == pooling


@pytest.mark.parametrize("change", [{"pooling": "odd"}, {"ps_version": "v1"}])
def test_bad_configs_are_refused(change: dict[str, Any], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError):
        NemotronEmbed({**config, **change}, torch.float32, torch.device("meta"))


def test_numbers_of_tiles_come_from_either_file(tmp_path: Path) -> None:
    config = {"force_image_size": 512, "vision_config": {"patch_size": 16}, "max_dynamic_patch": 3, "img_context_token_id": 5}

    def most(**settings: Any) -> int:
        (tmp_path / "processor_config.json").write_text(json.dumps(settings))
        info = NemotronEmbedProcessingInfo(ProcessorFiles(config=config, folder=tmp_path))
        return int(info.specs["image"].tiling.max_tiles)

    assert [most(), most(max_input_tiles=6), most(dynamic_image_size=False)] == [3, 6, 1]
