"""Adapters of requests that change experts: the oracle's experts have B A added to their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import Matrices, compare, hook, logprobs, matrices, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.in_process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


def change_experts(model: Any, scale: float, rank: int = 4) -> Matrices:
    """Add random B A to the matrices of every other expert of transformers' class. Return them by the names of each expert."""
    gen, pairs = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if not name.endswith("mlp.experts"):
            continue
        inner = module.down_proj.shape[-1]
        for number in range(0, len(module.down_proj), 2):
            gate_up = module.gate_up_proj.data[number]
            parts = {"gate_proj": gate_up[:inner], "up_proj": gate_up[inner:], "down_proj": module.down_proj.data[number]}
            for part, weight in parts.items():
                down = torch.randn(rank, weight.shape[1], generator=gen) / 4
                up = torch.randn(len(weight), rank, generator=gen) / 4
                pairs[f"{name}.{number}.{part}"] = down, up
                weight += up @ down * scale
    assert pairs
    return pairs


@pytest.mark.parametrize("name", ["text-qwen3_moe", "text-qwen3_next"])
def test_experts_and_the_shared_expert(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """Rows of an adapter, of another one and of the base model in one step are those of each alone."""
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    changed = copy.deepcopy(model)
    experts = change_experts(changed, 2.0)
    others = matrices(model, r"shared_expert\.(gate|up|down)_proj$|layers\.0\..*o(ut)?_proj$")
    folder = write(tmp_path / "experts", str(base), experts | others)
    other = write(tmp_path / "other", str(base), matrices(model, r"o(ut)?_proj$", seed=1))
    questions, params = [ask(row, "", seed) for seed in range(3)], greedy(6, logprobs=3, prompt_logprobs=0)
    with make_llm(row, base, enable_lora=True, batch_invariant=True) as llm:
        llm.load_adapter("experts", folder)
        llm.load_adapter("other", other)
        names = ["experts", None, "other"]
        prompts = [question.ours for question in questions]
        alone = [llm.generate(one, params, use_tqdm=False, adapter=name)[0] for one, name in zip(prompts, names, strict=True)]
        llm.reset_prefix_cache()
        together = llm.generate(prompts, params, use_tqdm=False, adapter=names)
        assert [logprobs(one) for one in together] == [logprobs(one) for one in alone]
        compare(llm, row, model, processor, questions[0])
        hook(changed, others, dict.fromkeys(others, 2.0))
        compare(llm, row, changed, processor, questions[0], adapter="experts")
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, questions[0], adapter="experts")


EXPERTS, RANK, HIDDEN, INNER, NUMBER = "model.layers.0.mlp.experts", 4, 64, 32, 8
JOINED: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], type[Exception], str]] = {
    "parameters": (
        {f"{EXPERTS}.lora_A": (NUMBER * RANK, HIDDEN), f"{EXPERTS}.lora_B": (2 * INNER, NUMBER * RANK)},
        {"target_parameters": ["mlp.experts.gate_up_proj"]}, ConfigError, "target_parameters",
    ),
    "parameters without their setting": (
        {f"{EXPERTS}.lora_A": (NUMBER * RANK, HIDDEN), f"{EXPERTS}.lora_B": (2 * INNER, NUMBER * RANK)},
        {}, CheckpointError, EXPERTS,
    ),
    "three dimensions": (
        {f"{EXPERTS}.gate_up_proj.lora_A": (NUMBER, RANK, HIDDEN), f"{EXPERTS}.gate_up_proj.lora_B": (NUMBER, 2 * INNER, RANK)},
        {}, CheckpointError, f"{EXPERTS}.gate_up_proj",
    ),
    "a shared outer matrix in three dimensions": (
        {f"{EXPERTS}.w1.lora_A": (1, RANK, HIDDEN), f"{EXPERTS}.w1.lora_B": (NUMBER, INNER, RANK)},
        {}, CheckpointError, f"{EXPERTS}.w1",
    ),
    "a shared outer matrix": (
        {f"{EXPERTS}.up_proj.lora_A": (RANK, HIDDEN), f"{EXPERTS}.0.up_proj.lora_B": (INNER, RANK)},
        {}, CheckpointError, f"{EXPERTS}.0.up_proj",
    ),
    "the setting of shared outer matrices": (
        {f"{EXPERTS}.0.up_proj.lora_A": (RANK, HIDDEN), f"{EXPERTS}.0.up_proj.lora_B": (INNER, RANK)},
        {"experts_shared_outer_loras": True}, ConfigError, "experts_shared_outer_loras",
    ),
}  # fmt: skip
"""Layouts that join or share the matrices of experts: shapes of tensors, settings, and the error with what it names."""


@pytest.fixture(scope="module")
def llm(world: LoadedModels) -> Iterator[LLM]:
    name = "text-qwen3_moe"
    with make_llm(ROWS[name], world.folder(name), enable_lora=True) as made:
        yield made


@pytest.mark.parametrize("case", JOINED)
def test_matrices_of_several_experts_are_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    shapes, settings, kind, named = JOINED[case]
    tensors = {f"base_model.model.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(kind, match=named.replace(".", r"\.")):
        llm.load_adapter("joined", write(tmp_path / "joined", "", {}, more=tensors, **settings))
    assert llm.list_adapters() == ()
