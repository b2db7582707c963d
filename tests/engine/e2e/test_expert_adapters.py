"""Adapters of requests that change experts: the oracle's experts have B A added to their weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import Matrices, compare, hook, logprobs, matrices, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium import LLM
from sensorium.callers.errors import CheckpointError
from sensorium.models.layers import moe

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


RANK, SCALE = 4, 2.0
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Factors:
    """Matrices of the experts of one layer, A `[experts or 1, rank, in]` and B `[experts or 1, out, rank]`."""

    name: str
    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]


def change_whole(model: Any, shared: str = "") -> list[Factors]:
    """Add random B A to the tensors of all experts of transformers' class.

    Args:
        shared: "outer": all experts have one A of their first layers and one B of the last ones; "all": they share everything.
    """
    gen, layers = torch.Generator().manual_seed(0), []
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        pairs = []
        for part, outer in (module.gate_up_proj, "A"), (module.down_proj, "B"):
            experts, rows, inner = part.shape
            counts = [1 if shared == "all" or (shared == "outer" and letter == outer) else experts for letter in "AB"]
            down = torch.randn(counts[0], RANK, inner, generator=gen) / 4
            up = torch.randn(counts[1], rows, RANK, generator=gen) / 4
            part.data += up @ down * SCALE
            pairs.append((down, up))
        layers.append(Factors(name, *pairs))
    assert layers
    return layers


def as_parameters(layer: Factors) -> Tensors:
    """Store matrices as peft stores those of `target_parameters`: ranks of all experts below the module of the experts."""
    tensors = {}
    for name, (down, up) in (f"{layer.name}.base_layer", layer.gate_up), (layer.name, layer.down):
        tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"] = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
    return tensors


def with_experts(layer: Factors) -> Tensors:
    """Store a tensor `[experts or 1, ...]` for each parameter of transformers' class."""
    parts = {"gate_up_proj": layer.gate_up, "down_proj": layer.down}
    return {
        f"{layer.name}.{part}.lora_{letter}": low
        for part, pair in parts.items()
        for letter, low in zip("AB", pair, strict=True)
    }


def _split(layer: Factors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    down, up = layer.gate_up
    gate_up = up.chunk(2, 1)
    return {"w1": (down, gate_up[0]), "w3": (down, gate_up[1]), "w2": layer.down}


def by_part(layer: Factors) -> Tensors:
    """Store a tensor `[experts or 1, ...]` for each layer of the experts, named as in Mixtral."""
    return {
        f"{layer.name}.{part}.lora_{letter}": low
        for part, pair in _split(layer).items()
        for letter, low in zip("AB", pair, strict=True)
    }


def beside_each(layer: Factors) -> Tensors:
    """Store a shared matrix without a dimension of experts, beside matrices of each expert."""
    names, tensors = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}, {}
    for part, pair in _split(layer).items():
        for letter, low in zip("AB", pair, strict=True):
            if len(low) == 1:
                tensors[f"{layer.name}.{names[part]}.lora_{letter}"] = low[0]
            else:
                tensors |= {f"{layer.name}.{n}.{names[part]}.lora_{letter}": own for n, own in enumerate(low)}
    return tensors


PARAMETERS = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
LAYOUTS: dict[str, tuple[Callable[[Factors], Tensors], str, dict[str, Any]]] = {
    "parameters": (as_parameters, "", PARAMETERS),
    "parameters, unnamed": (as_parameters, "", {}),
    "experts": (with_experts, "", {}),
    "experts, shared": (with_experts, "outer", {"experts_shared_outer_loras": True}),
    "experts, all shared": (with_experts, "all", {}),
    "parts": (by_part, "", {}),
    "parts, shared": (by_part, "outer", {}),
    "beside each": (beside_each, "outer", {}),
}
"""How matrices of all experts are stored: the function that stores a layer's, what experts share, settings."""


@pytest.fixture(scope="module")
def llm(world: LoadedModels) -> Iterator[LLM]:
    name = "text-qwen3_moe"
    with make_llm(ROWS[name], world.folder(name), enable_lora=True) as made:
        yield made


def store(folder: Path, layers: list[Factors], layout: str) -> Path:
    tensors, _, settings = LAYOUTS[layout]
    more = {
        f"base_model.model.{name}.weight": low.clone().contiguous() for each in layers for name, low in tensors(each).items()
    }
    return write(folder, "", {}, more=more, **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_of_all_experts(llm: LLM, world: LoadedModels, tmp_path: Path, layout: str) -> None:
    row = ROWS["text-qwen3_moe"]
    model, processor = row.load(world.folder(row.name))
    layers = change_whole(model, LAYOUTS[layout][1])
    llm.load_adapter("mine", store(tmp_path / "mine", layers, layout))
    compare(llm, row, model, processor, ask(row, "", 0), adapter="mine")


def test_experts_of_each_modality(world: LoadedModels, tmp_path: Path) -> None:
    """Rows of text and images have their own experts; rows of the base model stand in the same step."""
    row, base = ROWS["ernie4_5_vl"], world.folder("ernie4_5_vl")
    (model, processor), (plain, _) = row.load(base), row.load(base)
    folder, params = store(tmp_path / "mine", change_whole(model), "experts"), greedy(6, logprobs=3, prompt_logprobs=0)
    with make_llm(row, base, enable_lora=True, batch_invariant=True) as llm:
        llm.load_adapter("mine", folder)
        compare(llm, row, model, processor, ask(row, "i", 0), adapter="mine")
        compare(llm, row, plain, processor, ask(row, "i", 0))
        prompts, names = [ask(row, "i", 0).ours] * 2, ["mine", None]
        alone = [llm.generate(prompts[0], params, use_tqdm=False, adapter=name)[0] for name in names]
        llm.reset_prefix_cache()
        together = llm.generate(prompts, params, use_tqdm=False, adapter=names)
        assert [logprobs(one) for one in together] == [logprobs(one) for one in alone]


@pytest.mark.parametrize("layout", ["parameters", "experts, shared", "parts, shared", "beside each"])
def test_merged_matrices_of_all_experts(world: LoadedModels, tmp_path: Path, layout: str) -> None:
    """The base model's weights are stored one by one; test_peft_adapters has those of all experts in one tensor."""
    row = ROWS["text-qwen3_moe"]
    model, processor = row.load(world.folder(row.name))
    folder = store(tmp_path / "mine", change_whole(model, LAYOUTS[layout][1]), layout)
    with make_llm(row, world.folder(row.name), adapter=str(folder)) as merged:
        compare(merged, row, model, processor, ask(row, "", 0))


@pytest.mark.parametrize("case", ["other experts", "another width"])
def test_matrices_of_other_experts_are_not_merged(world: LoadedModels, tmp_path: Path, case: str) -> None:
    shapes, settings, named = WRONG[case]
    tensors = {f"base_model.model.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    folder = write(tmp_path / "wrong", "", {}, more=tensors, **settings)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        make_llm(ROWS["text-qwen3_moe"], world.folder("text-qwen3_moe"), adapter=str(folder))


def test_one_content_in_two_layouts_is_one_adapter(llm: LLM, world: LoadedModels, tmp_path: Path) -> None:
    layers = change_whole(ROWS["text-qwen3_moe"].load(world.folder("text-qwen3_moe"))[0])
    infos = [
        llm.load_adapter(f"a{n}", store(tmp_path / str(n), layers, layout)) for n, layout in enumerate(("parameters", "parts"))
    ]
    assert len({info.identity for info in infos}) == 1
    assert {info.rank for info in infos} == {RANK}


E, H, W = 8, 64, 48  # experts, hidden size, width of an expert
EXPERTS = "model.layers.0.mlp.experts"
WRONG: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "one parameter without its setting": (
        {f"{EXPERTS}.lora_A": (E * RANK, H), f"{EXPERTS}.lora_B": (2 * W, E * RANK)}, {}, "target_parameters",
    ),
    "fewer parameters than the setting": (
        {f"{EXPERTS}.lora_A": (E * RANK, H), f"{EXPERTS}.lora_B": (2 * W, E * RANK)}, PARAMETERS, "target_parameters",
    ),
    "another rank": (
        {f"{EXPERTS}.lora_A": (E * RANK, W), f"{EXPERTS}.lora_B": (H, E * RANK)},
        {"target_parameters": ["experts.down_proj"], "r": 5}, "rank 5",
    ),
    "no rows": (
        {f"{EXPERTS}.lora_A": (0, W), f"{EXPERTS}.lora_B": (H, 0)}, {"target_parameters": ["experts.down_proj"]}, "down_proj",
    ),
    "other experts": (
        {f"{EXPERTS}.lora_A": (2 * RANK, W), f"{EXPERTS}.lora_B": (H, 2 * RANK)},
        {"target_parameters": ["experts.down_proj"]}, f"{EXPERTS}.down_proj",
    ),
    "another width": (
        {f"{EXPERTS}.gate_up_proj.lora_A": (E, RANK, H), f"{EXPERTS}.gate_up_proj.lora_B": (E, 2 * W - 2, RANK)},
        {}, f"{EXPERTS}.gate_up_proj",
    ),
    "two ranks": (
        {f"{EXPERTS}.w1.lora_A": (1, RANK, H), f"{EXPERTS}.w1.lora_B": (E, W, RANK + 1)}, {}, f"{EXPERTS}.w1",
    ),
    "one matrix": ({f"{EXPERTS}.w1.lora_A": (E, RANK, H)}, {}, f"{EXPERTS}.w1"),
    "two dimensions": (
        {f"{EXPERTS}.up_proj.lora_A": (RANK, H), f"{EXPERTS}.up_proj.lora_B": (W, RANK)}, {}, f"{EXPERTS}.up_proj",
    ),
    "a missing expert": (
        {f"{EXPERTS}.up_proj.lora_A": (RANK, H), f"{EXPERTS}.1.up_proj.lora_B": (W, RANK)}, {}, f"{EXPERTS}.up_proj",
    ),
    "DoRA": (
        {f"{EXPERTS}.w1.lora_A": (1, RANK, H), f"{EXPERTS}.w1.lora_B": (E, W, RANK)}, {"use_dora": True}, f"{EXPERTS}.w1",
    ),
    "a setting of no list": (
        {f"{EXPERTS}.lora_A": (E * RANK, W), f"{EXPERTS}.lora_B": (H, E * RANK)}, {"target_parameters": 3}, "target_parameters",
    ),
}  # fmt: skip
"""Matrices of several experts that are refused: shapes of tensors, settings, and what the error names."""


@pytest.mark.parametrize("case", WRONG)
def test_other_matrices_of_several_experts_are_refused_by_name(llm: LLM, tmp_path: Path, case: str) -> None:
    shapes, settings, named = WRONG[case]
    tensors = {f"base_model.model.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    before = llm.list_adapters()
    with pytest.raises(CheckpointError, match=re.escape(named)):
        llm.load_adapter("wrong", write(tmp_path / "wrong", "", {}, more=tensors, **settings))
    assert llm.list_adapters() == before


def test_stacked_experts_are_refused_by_name(world: LoadedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where all experts are multiplied at once. Other layers of such a model take adapters."""
    monkeypatch.setattr(moe, "backend", lambda op, *_: "triton" if op == "moe" else "torch")
    row, base = ROWS["text-qwen3_moe"], world.folder("text-qwen3_moe")
    model, _ = row.load(base)
    attention = write(tmp_path / "attention", str(base), matrices(model, r"o_proj$"))
    experts = write(tmp_path / "experts", str(base), change_experts(model, 1.0))
    shapes = {"A": (E * RANK, H), "B": (2 * W, E * RANK)}
    more = {
        f"base_model.model.{EXPERTS}.base_layer.lora_{letter}.weight": torch.ones(shape) for letter, shape in shapes.items()
    }
    more |= {f"base_model.model.{EXPERTS}.lora_A.weight": torch.ones(E * RANK, W)}
    more |= {f"base_model.model.{EXPERTS}.lora_B.weight": torch.ones(H, E * RANK)}
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    both = write(tmp_path / "both", str(base), {}, more=more, target_parameters=parameters)
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("attention", attention)
        for folder in (experts, both):
            with pytest.raises(CheckpointError, match=re.escape(EXPERTS)):
                llm.load_adapter("wrong", folder)
        assert [info.name for info in llm.list_adapters()] == ["attention"]


@pytest.mark.parametrize("name", ["text-qwen3_moe", "qwen3_5_moe"])
def test_a_router(world: LoadedModels, tmp_path: Path, name: str) -> None:
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    routers = matrices(model, r"mlp\.gate$", seed=2)
    folder = write(tmp_path / "router", str(base), routers)
    for path, (down, up) in routers.items():
        model.get_submodule(path).weight.data += up @ down * SCALE
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("router", folder)
        compare(llm, row, model, processor, ask(row, row.default_cases()[0], 0), adapter="router")
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, ask(row, row.default_cases()[0], 0))
