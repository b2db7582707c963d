"""jina-embeddings-v4 in the suite of embedders: transformers' Qwen2.5-VL, and the publisher's adapters and projector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from embedder import Embedder
from oracle import build_model, build_processor, load_oracle
from safetensors.torch import load_file, save_file
from torch.func import functional_call

PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
TASKS = ["retrieval", "code"]
TARGETS = ("self_attn.q_proj", "mlp.down_proj")
WIDTH, OUT, RANK, SCALE = 64, 24, 4, 2.0
ADAPTERS = "adapters/adapter_model.safetensors"


def build(seed: int) -> tuple[Any, Any]:
    return build_model(seed=seed, layers=2, vision_depth=2, full_attention=(1,)), build_processor()


def finish(folder: Path) -> None:
    """Add the projector and the adapters of two tasks, in the publisher's layout."""
    stored, gen = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    stored["multi_vector_projector.weight"] = torch.randn(OUT, WIDTH, generator=gen) / 8
    stored["multi_vector_projector.bias"] = torch.randn(OUT, generator=gen) / 8
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    more = {"architectures": ["JinaEmbeddingsV4Model"], "task_names": TASKS, "multi_vector_projector_dim": OUT}
    (folder / "config.json").write_text(json.dumps(config | more))
    ends = tuple(f"{target}.weight" for target in TARGETS)
    matrices = dict[str, torch.Tensor]()
    for name in [*(one for one in stored if "visual" not in one and one.endswith(ends)), "multi_vector_projector.weight"]:
        (rows, columns), module = stored[name].shape, name.removesuffix(".weight")
        for task in TASKS:
            matrices[f"base_model.model.{module}.lora_A.{task}.weight"] = torch.randn(RANK, columns, generator=gen) / 8
            matrices[f"base_model.model.{module}.lora_B.{task}.weight"] = torch.randn(rows, RANK, generator=gen) / 8
    (folder / ADAPTERS).parent.mkdir()
    save_file(matrices, folder / ADAPTERS)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": "(.*(model).*(down_proj|q_proj).*$)"}
    (folder / ADAPTERS).with_name("adapter_config.json").write_text(json.dumps(settings))


class Adapted(torch.nn.Module):
    """Qwen2.5-VL without a head, and the projector; the adapter of a task is added while it runs."""

    def __init__(self, inner: Any, projector: torch.nn.Linear, added: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.multi_vector_projector = inner.model, projector
        own = dict(self.named_parameters())
        self.merged = {name: own[name] + matrix for name, matrix in added.items()}

    def forward(self, given: Mapping[str, Any], tokens: bool) -> torch.Tensor:
        hidden = self.model(**given).last_hidden_state[0]
        if tokens:
            return self.multi_vector_projector(hidden)
        if "image_grid_thw" in given:
            ids, config = given["input_ids"][0].tolist(), self.model.config
            start, end = ids.index(config.vision_start_token_id), ids.index(config.vision_end_token_id)
            hidden = hidden[start : end + 1]
        return hidden.mean(0)


def load(folder: Path, task: str = TASKS[0]) -> tuple[Any, Any]:
    """Return transformers' model with the projector and a task's adapter, and the processor."""
    inner, processor = load_plain(folder)
    stored, matrices, added = load_file(folder / "model.safetensors"), load_file(folder / ADAPTERS), dict[str, torch.Tensor]()
    for name, first in matrices.items():
        if f".lora_A.{task}." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_A")[0].removeprefix("model.")
            path = (
                module
                if module.startswith("multi_vector")
                else f"model.language_model.{module.removeprefix('language_model.')}"
            )
            added[f"{path}.weight"] = matrices[name.replace("lora_A", "lora_B")] @ first * SCALE
    projector = torch.nn.Linear(WIDTH, OUT)
    projector.load_state_dict({part: stored[f"multi_vector_projector.{part}"] for part in ("weight", "bias")})
    return Adapted(inner, projector, added).eval(), processor


def load_plain(folder: Path) -> tuple[Any, Any]:
    """Load transformers' class, whose config.json does not name the publisher's."""
    file = folder / "config.json"
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}))
    try:
        return load_oracle(folder)
    finally:
        file.write_text(kept)


def inputs(processor: Any, item: Any, before: str = "Query: ") -> dict[str, Any]:
    text, images = (before + item, None) if isinstance(item, str) else (PAGE, [item])
    return dict(processor(text=[text], images=images, return_tensors="pt"))


def run(model: Adapted, given: Mapping[str, Any], tokens: bool = False) -> torch.Tensor:
    found = functional_call(model, model.merged, (given, tokens))
    return torch.nn.functional.normalize(found, dim=-1)


EMBEDDERS = [Embedder("jina_v4", build, inputs, run, load=load, finish=finish, tolerance=3e-5)]
