"""Reads low-rank matrices that an adapter stores for all experts of a mixture in one tensor.

Sources: `ParamWrapper` of peft (`target_parameters`); the layouts with a dimension of experts that vLLM and SGLang read, in
which all experts may share one of the two matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from .adapters import adapter_path, patterns
from .config import positive_int

_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of a mixture's experts, in the order in which transformers' classes have them."""
EXPERT_TENSORS = tuple(f".experts.{name}" for name in _PARAMETERS)
_MATRIX = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_([AB])(?:\.default)?(?:\.weight)?")
_JOINED = re.compile(rf"(.+\.experts)\.({'|'.join((*_PARAMETERS, *_PARTS))})")
_NUMBERED = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """The two matrices of an adapter for one parameter of all experts.

    Args:
        module: name of the parameter in the adapter.
        stored: name of the tensor of all experts, before prefixes are renamed.
        down: `[experts, rank, in]`. up: `[experts, out, rank]`. The first dimension is 1 if the experts share the matrix.
    """

    module: str
    stored: str
    down: Tensor
    up: Tensor


def split_experts(
    raw: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> tuple[list[ExpertMatrices], list[tuple[str, Tensor]]]:
    """Return the matrices that belong to all experts, and the other tensors of an adapter.

    Args:
        raw: adapter_config.json.

    Raises:
        CheckpointError: the shapes of two matrices do not fit each other, or the adapter does not say which weight they change.
    """
    remaining = dict(tensors)
    experts = [*_take_parameters(raw, remaining), *_take_joined(remaining)]
    for matrices in experts:
        _check(matrices)
    return experts, list(remaining.items())


def tensor_of_experts(name: str) -> str:
    """Return the name that transformers gives to a stored tensor of all experts. Only Aria's checkpoints have other names."""
    return name.replace(".experts.fc1.weight", ".experts.gate_up_proj").replace(".experts.fc2.weight", ".experts.down_proj")


def expert_of(name: str) -> tuple[int, str, Sequence[str]] | None:
    """Return the number of a weight's expert, its projection, and names of tensors of all experts that may include it.

    For weights that are not those of one expert, return None.
    """
    match = _NUMBERED.fullmatch(name.removesuffix(".weight"))
    if match is None or match[3] not in _PARAMETERS:
        return None
    parts = [match[3]] if match[3] == "down_proj" else [match[3], "gate_up_proj"]
    return int(match[2]), match[3], [f"{match[1]}.{part}" for part in parts]


def changed_experts(matrices: ExpertMatrices, scale: float, weight: Tensor, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Return the weight of all experts with the products added: summed in float32 and rounded once to `dtype`.

    Args:
        weight: `[experts, out, in]` or `[experts, in, out]`; the shape of the product says which.
        transposed: a weight of square matrices is `[experts, in, out]`.
    """
    changed = torch.empty(weight.shape, dtype=dtype)
    for number, expert_weight in enumerate(weight):
        change = _product(matrices, number)
        is_square = expert_weight.shape[0] == expert_weight.shape[1]
        is_transposed = change.shape != expert_weight.shape or (transposed and is_square)
        changed[number] = expert_weight.float() + (change.mT if is_transposed else change) * scale
    return changed


def changed_expert(matrices: ExpertMatrices, scale: float, number: int, part: str, weight: Tensor) -> Tensor:
    """Return one expert's weight `[out, in]` with the product added, in float32. `part`: as `expert_of` returns it."""
    return weight.float() + _part(matrices, part, _product(matrices, number)) * scale


def fits(matrices: ExpertMatrices, weight: Tensor, number: int | None, part: str) -> bool:
    """Return whether the products fit a weight: that of all experts if `number` is None, else a projection of one expert."""
    change = _product(matrices, 0)
    shape = tuple(_part(matrices, part, change).shape)
    experts = max(len(matrices.down), len(matrices.up))
    if number is not None:
        return tuple(weight.shape) == shape and (experts == 1 or number < experts)
    return weight.ndim == 3 and experts in (1, len(weight)) and tuple(weight.shape[1:]) in (shape, shape[::-1])


def _part(matrices: ExpertMatrices, part: str, product: Tensor) -> Tensor:
    """Return the rows of a product `[out, in]` that belong to one projection."""
    if matrices.stored.endswith(".gate_up_proj") and part in ("gate_proj", "up_proj"):
        return product.chunk(2)[part == "up_proj"]
    return product


def _product(matrices: ExpertMatrices, number: int) -> Tensor:
    """Return B A of one expert: float32 `[out, in]`."""
    down, up = (each[number if len(each) > 1 else 0].float() for each in (matrices.down, matrices.up))
    return up @ down


def _take_parameters(raw: Mapping[str, Any], tensors: dict[str, Tensor]) -> Iterable[ExpertMatrices]:
    """Yield the matrices of `target_parameters`, which peft stores under the module's name, and remove them from `tensors`.

    If a module has several such parameters, peft nests their wrappers, and the first parameter has the innermost one.
    """
    targets, modules = _targets(raw), dict[str, dict[int, dict[str, str]]]()
    for name in tensors:
        match = _MATRIX.fullmatch(adapter_path(name))
        if match is not None and (match[1].endswith(".experts") or _targeted(match[1], ("weight",), targets)):
            modules.setdefault(match[1], {}).setdefault(match[2].count("."), {})[match[3]] = name
    for module, levels in modules.items():
        parameters = _targeted(module, (*_PARAMETERS, "weight"), targets)
        if not targets and len(levels) == 2:
            parameters = ["gate_up_proj", "down_proj"]
        if len(parameters) != len(levels) or set(levels) != set(range(len(levels))):
            reason = f"{len(levels)} parameters of {module}, and its target_parameters name {len(parameters)} of them"
            raise CheckpointError(f"the adapter has matrices for {reason}; save it again with peft")
        for level, names in levels.items():
            parameter = parameters[len(levels) - 1 - level]
            matrices = _by_expert(raw, module, parameter, {letter: tensors[name] for letter, name in names.items()})
            if matrices is not None:
                yield matrices
                for name in names.values():
                    del tensors[name]


def _targets(raw: Mapping[str, Any]) -> list[str]:
    targets = raw.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) and target for target in targets):
        raise CheckpointError(
            "target_parameters of adapter_config.json must be a list of names; save the adapter again with peft"
        )
    return targets


def _targeted(module: str, parameters: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the parameters of a module that `target_parameters` names. As in peft, the ends of their paths are compared."""
    return [name for name in parameters if any(f".{module}.{name}".endswith(f".{target}") for target in targets)]


def _by_expert(raw: Mapping[str, Any], module: str, parameter: str, matrices: Mapping[str, Tensor]) -> ExpertMatrices | None:
    """Split matrices `[experts x rank, in]` and `[out, rank x experts]` by expert. Return None for an ordinary linear layer."""
    name = f"{module}.{parameter}"
    pattern = next((rank for pattern, rank in patterns(raw, "rank_pattern") if pattern.match(name)), None)
    rank = positive_int({"r": 8, **raw} if pattern is None else {"r": pattern}, "r", "adapter_config.json")
    down, up = (matrices.get(letter, torch.empty(0)) for letter in "AB")
    if down.ndim != 2 or up.ndim != 2 or not 0 < len(down) == up.shape[1] or len(down) % rank:
        raise CheckpointError(
            f"the adapter's matrices of {name} are {list(down.shape)} and {list(up.shape)}, which are not those of "
            f"experts with rank {rank}; save it again with peft"
        )
    if parameter == "weight" and len(down) == rank:
        return None
    by_expert = up.unflatten(1, (rank, -1)).permute(2, 0, 1)  # [out, rank x experts] -> [experts, out, rank]
    return ExpertMatrices(name, name, down.unflatten(0, (-1, rank)), by_expert)


def _take_joined(tensors: dict[str, Tensor]) -> Iterable[ExpertMatrices]:
    """Yield the matrices that have a dimension of experts or that experts share, and remove them from `tensors`."""
    modules = dict[str, dict[str, str]]()
    numbered = dict[str, dict[str, dict[int, str]]]()  # name of the joint module -> letter -> expert -> tensor's name
    for name in tensors:
        match = _MATRIX.fullmatch(adapter_path(name))
        if match is None or match[2]:
            continue
        if _JOINED.fullmatch(match[1]):
            modules.setdefault(match[1], {})[match[3]] = name
        elif expert := _NUMBERED.fullmatch(match[1]):
            numbered.setdefault(f"{expert[1]}.{expert[3]}", {}).setdefault(match[3], {})[int(expert[2])] = name
    for module, names in modules.items():
        matrices, taken = {letter: tensors[name] for letter, name in names.items()}, list(names.values())
        for letter, experts in numbered.get(module, {}).items():
            shapes = {tensors[name].shape for name in experts.values()}
            if letter in matrices or len(shapes) > 1 or sorted(experts) != list(range(len(experts))):
                reason = "must be one matrix for all experts, or one per expert"
                raise CheckpointError(f"the adapter's lora_{letter} of {module} {reason}; save it again with peft")
            matrices[letter] = torch.stack([tensors[experts[number]] for number in range(len(experts))])
            taken += experts.values()
        if len(matrices) < 2 or max(matrix.ndim for matrix in matrices.values()) < 3:
            reason = "lack lora_A, lora_B or the dimension of experts"
            raise CheckpointError(f"the adapter's matrices of {module} {reason}; save it again with peft")
        down, up = (matrices[letter] if matrices[letter].ndim != 2 else matrices[letter][None] for letter in "AB")
        parent, _, part = module.rpartition(".")
        yield ExpertMatrices(module, f"{parent}.{_PARTS.get(part, part)}", down, up)
        for name in taken:
            del tensors[name]


def _check(matrices: ExpertMatrices) -> None:
    down, up = matrices.down, matrices.up
    if (
        down.ndim != 3
        or up.ndim != 3
        or down.shape[1] != up.shape[2]
        or not down.numel()
        or not up.numel()
        or (len(down) != len(up) and 1 not in (len(down), len(up)))
    ):
        raise CheckpointError(
            f"the adapter's lora_A and lora_B of {matrices.module} are {list(down.shape)} and {list(up.shape)}, which are not "
            "two matrices of the same rank per expert"
        )
