"""jina-embeddings-v4 against its publisher's rule on transformers' Qwen2.5-VL with the task's adapter merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family import make_media
from oracle import build_checkpoint, load_oracle
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.mm.errors import ConfigError

PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
TASKS = ["retrieval", "code"]
TARGETS = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in the publisher's layout, with adapters of two tasks."""
    path = build_checkpoint(tmp_path_factory.mktemp("jina") / "model", layers=2, vision_depth=2, full_attention=(1,))
    stored, gen = load_file(path / "model.safetensors"), torch.Generator().manual_seed(5)
    projector = {
        "multi_vector_projector.weight": torch.randn(24, 64, generator=gen) / 8,
        "multi_vector_projector.bias": torch.randn(24, generator=gen) / 8,
    }
    save_file(stored | projector, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    more = {"architectures": ["JinaEmbeddingsV4Model"], "task_names": TASKS, "multi_vector_projector_dim": 24}
    (path / "config.json").write_text(json.dumps(config | more))
    modules = [
        name.removesuffix(".weight")
        for name in stored
        if "visual" not in name and name.endswith(tuple(f"{target}.weight" for target in TARGETS))
    ]
    matrices = dict[str, torch.Tensor]()
    for module in [*modules, "multi_vector_projector"]:
        rows, columns = (stored | projector)[f"{module}.weight"].shape
        for task in TASKS:
            matrices[f"base_model.model.{module}.lora_A.{task}.weight"] = torch.randn(4, columns, generator=gen) / 8
            matrices[f"base_model.model.{module}.lora_B.{task}.weight"] = torch.randn(rows, 4, generator=gen) / 8
    (path / "adapters").mkdir()
    save_file(matrices, path / "adapters" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "(.*(model).*(down_proj|q_proj).*$)"}
    (path / "adapters" / "adapter_config.json").write_text(json.dumps(settings))
    return path


def oracle(folder: Path, task: str, tmp_path: Path) -> tuple[Any, Any, torch.nn.Linear]:
    """Return transformers' model, its processor and the projector, with the task's adapter merged."""
    tensors = load_file(folder / "model.safetensors")
    matrices = load_file(folder / "adapters" / "adapter_model.safetensors")
    for name, first in matrices.items():
        if f".lora_A.{task}." in name:
            second = matrices[name.replace("lora_A", "lora_B")]
            tensors[name.removeprefix("base_model.model.").partition(".lora_A")[0] + ".weight"] += second @ first * 2
    projector = torch.nn.Linear(64, 24)
    own = {name.rpartition(".")[2]: tensors.pop(name) for name in list(tensors) if name.startswith("multi_vector")}
    projector.load_state_dict(own)
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}))
    return *load_oracle(tmp_path), projector


def expected(model: Any, processor: Any, projector: torch.nn.Linear, text: str, images: list[Any]) -> list[torch.Tensor]:
    """Return the single vector and the vectors of tokens."""
    given = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    with torch.inference_mode():
        hidden = model.model(**given).last_hidden_state[0]
        ids = given["input_ids"][0].tolist()
        start, end = (processor.tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>") for name in ("start", "end"))
        pooled = hidden[ids.index(start) : ids.index(end) + 1] if images else hidden
        return [torch.nn.functional.normalize(one, dim=-1) for one in (pooled.mean(0), projector(hidden))]


@pytest.mark.parametrize("task", TASKS)
def test_vectors_are_the_publishers(task: str, folder: Path, tmp_path: Path) -> None:
    model = oracle(folder, task, tmp_path)
    image = make_media("image", (90, 130), 0)
    with LLM(folder, max_model_len=512, max_num_seqs=4, hf_overrides={"task": task}) as llm:
        found = [*llm.embed(["a house", image], use_tqdm=False), *llm.embed("a house", instruction="Passage", use_tqdm=False)]
        tokens = llm.embed(["a house", image], pooling="tokens", use_tqdm=False)
        scores = llm.score("a house", ["a house", image], use_tqdm=False)
    query, page, passage = (
        expected(*model, text, images) for text, images in (("Query: a house", []), (PAGE, [image]), ("Passage: a house", []))
    )
    for one, theirs in zip([*found, *tokens], [query[0], page[0], passage[0], query[1], page[1]], strict=True):
        assert one.error is None, one.error
        assert one.vector.shape == theirs.shape
        assert (one.vector - theirs).abs().max() < 3e-5
    assert [one.score for one in scores] == pytest.approx([float(query[0] @ one[0]) for one in (passage, page)], abs=5e-5)


def test_an_unknown_task_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no task 'codes'; did you mean code"):
        LLM(folder, hf_overrides={"task": "codes"})
