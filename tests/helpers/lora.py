"""LoRA adapters of transformers' models in peft's layout, and the oracle: hooks that add B(A(x)) as peft does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from parity import positions, record
from safetensors.torch import save_file

GIVEN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*", "task_type": "CAUSAL_LM"}
Matrices = dict[str, tuple[torch.Tensor, torch.Tensor]]


def matrices(model: torch.nn.Module, chosen: str, rank: int = 4, seed: int = 0) -> Matrices:
    """Return random matrices A and B of each chosen product of transformers' class."""
    gen, found = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.ndim >= 2 and re.search(chosen, name):
            shape = weight.shape
            found[name] = (torch.randn(rank, *shape[1:], generator=gen) / 4, torch.randn(shape[0], rank, generator=gen) / 4)
    assert found
    return found


def table_matrices(model: torch.nn.Module, chosen: str, rank: int = 4, seed: int = 0) -> Matrices:
    """Return random matrices A `[rank, vocab]` and B `[dim, rank]` of each chosen table of embeddings."""
    gen = torch.Generator().manual_seed(seed)
    names = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding) and re.search(chosen, name)
    ]
    shapes = {name: model.get_submodule(name).weight.shape for name in names}
    assert shapes
    return {
        name: (torch.randn(rank, vocab, generator=gen) / 4, torch.randn(dim, rank, generator=gen) / 4)
        for name, (vocab, dim) in shapes.items()
    }


def table_tensors(pairs: Matrices) -> dict[str, torch.Tensor]:
    """Return the matrices of tables under the names of peft."""
    named = (zip("AB", matrices, strict=True) for matrices in pairs.values())
    return {
        f"base_model.model.{name}.lora_embedding_{letter}": matrix
        for name, matrices in zip(pairs, named, strict=True)
        for letter, matrix in matrices
    }


def write(folder: Path, base: str, pairs: Matrices, rename: Any = str, more: Any = None, **settings: Any) -> Path:
    folder.mkdir()
    tensors = dict(more or {})
    for name, (down, up) in pairs.items():
        tensors[f"base_model.model.{rename(name)}.lora_A.weight"] = down
        tensors[f"base_model.model.{rename(name)}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(GIVEN | {"base_model_name_or_path": base} | settings))
    return folder


def magnitudes(model: torch.nn.Module, pairs: Matrices, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random lengths of the rows of each changed weight, near those of the base weight."""
    gen = torch.Generator().manual_seed(seed)
    weights = {name: model.get_submodule(name).weight.float() for name in pairs}
    return {name: weight.norm(dim=1) * (0.5 + torch.rand(len(weight), generator=gen)) for name, weight in weights.items()}


def dora_tensors(lengths: dict[str, torch.Tensor], rename: Any = str) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{rename(name)}.lora_magnitude_vector": length for name, length in lengths.items()}


def hook_dora(model: torch.nn.Module, pairs: Matrices, scale: float, lengths: dict[str, torch.Tensor]) -> list[Any]:
    """Scale the outputs of the modules and add `B(A(x))`, as peft does with DoRA."""

    def change(name: str) -> Any:
        down, up = pairs[name]

        def forward(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            gain = lengths[name] / torch.linalg.norm(module.weight + up @ down * scale, dim=1)
            bare = output if module.bias is None else output - module.bias
            return output + (gain - 1) * bare + gain * (inputs[0] @ down.T @ up.T) * scale

        return forward

    return [model.get_submodule(name).register_forward_hook(change(name)) for name in pairs]


def hook(model: torch.nn.Module, pairs: Matrices, scale: dict[str, float]) -> list[Any]:
    """Add `B(A(x)) * scale` to the outputs of the modules, as peft does. A of a table of embeddings is `[rank, vocab]`."""

    def add(name: str) -> Any:
        down, up = pairs[name]
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.Embedding):
            factor = scale[name] * float(getattr(module, "embed_scale", 1.0))
            return lambda _, inputs, output: output + (down.T[inputs[0]] @ up.T) * factor
        return lambda _, inputs, output: output + (inputs[0] @ down.flatten(1).T @ up.T) * scale[name]

    return [model.get_submodule(name).register_forward_hook(add(name)) for name in pairs]


def compare(llm: Any, row: Any, model: Any, processor: Any, question: Any, **call: Any) -> None:
    output, ours = record(llm, question, 8, **call)
    ids = output.outputs[0].token_ids
    theirs = row.run(model, question.theirs(processor), ids, positions(llm, question, len(ids)))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    assert [one.error for one in outputs] == [None] * len(outputs)
    return [tuple(one.outputs[0].token_ids) for one in outputs]


def logprobs(output: Any) -> list[dict[int, float]]:
    """Return the likelihoods of the prompt's and the answer's tokens, whose bits a test compares."""
    answer = output.outputs[0]
    rows = [row for row in (*(output.prompt_logprobs or ()), *(answer.logprobs or ())) if row is not None]
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]
