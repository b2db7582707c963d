"""Merges a LoRA adapter, in the layout of peft, into the weights of its base model while they are read.

Source: arXiv 2106.09685; the tensor names and scales of peft.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.grouped import panel_rows
from ..mm.errors import CheckpointError
from .adapters import check_settings, low_rank_scale, patterns
from .layers.basic import rename

_READ = ("target_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
         "exclude_modules", "ensure_weight_tying")  # fmt: skip
"""Settings that only say which tensors the adapter has, and `alpha_pattern`."""
_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
_MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?")
_TASK = re.compile(r"(.+\.lora_[AB](?:\.default)?)\.([^.]+)\.weight")
_UNKNOWN = re.compile(r"lora_|trainable_tokens|token_adapter")
_EMBEDDING = "language_model.embed_tokens.weight"


def tensors_of_task(tensors: Iterable[tuple[str, Tensor]], task: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors. Where it has matrices for several tasks, yield those of one, without the task's name."""
    for name, tensor in tensors:
        found = None if task is None else _TASK.fullmatch(name)
        if found is None:
            yield name, tensor
        elif found[2] == task:
            yield f"{found[1]}.weight", tensor


class MergedAdapter:
    """An adapter: weights become `W + B A * scale`, and modules of `modules_to_save` are replaced.

    Args:
        raw: adapter_config.json.
        tensors: of the adapter's file by name; on the meta device for `add_headers` only.
        prefixes: (stored, canonical) prefixes of the model's tensor names. Two names match if they become the same.
        dtype: of the model.

    Raises:
        ConfigError: a setting is not supported.
        CheckpointError: a tensor is not one of LoRA, or its counterpart is missing.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
        prefixes: Sequence[tuple[str, str]],
        dtype: torch.dtype,
    ) -> None:
        check_settings(raw, _READ)
        self._config, self._prefixes, self._dtype = {"lora_alpha": 8, **raw}, prefixes, dtype
        self._alphas = patterns(raw, "alpha_pattern")
        self._replaced: dict[str, tuple[str, Tensor]] = {}  # key -> name, tensor
        self._pairs: dict[str, tuple[str, dict[str, Tensor]]] = {}  # key -> module, matrices
        self._embeddings = set[str]()
        for name, tensor in tensors:
            own = _WRAPPERS.sub("", name.removeprefix(_PREFIX))
            matrix = _MATRIX.fullmatch(own)
            if matrix is None:
                if _UNKNOWN.search(own):
                    raise CheckpointError(f"the adapter holds {name}, which is not supported; merge it into the model")
                self._replaced[self._key(own)] = own, tensor
                continue
            module, embedding, letter, *_ = matrix.groups()
            key = self._key(f"{module}.weight")
            self._pairs.setdefault(key, (module, {}))[1][letter] = tensor
            self._embeddings |= {key} if embedding else set()
        for module, matrices in self._pairs.values():
            ranks = {
                one.shape[0] if letter == "A" else one.shape[1:].numel() for letter, one in matrices.items() if one.ndim > 1
            }
            if len(matrices) < 2 or len(ranks) != 1 or 0 in ranks or min(one.ndim for one in matrices.values()) < 2:
                raise CheckpointError(f"the adapter's lora_A and lora_B of {module} are not two matrices of one rank")

    def _key(self, name: str) -> str:
        return rename(name, self._prefixes).removeprefix("model.")

    def _shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the weight that a pair changes."""
        first, second = (self._pairs[key][1][letter] for letter in "AB")
        if key in self._embeddings:
            return first.shape[1], second.shape[0]
        return second.shape[0], *first.shape[1:]

    def add_headers(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the base model's tensors on the meta device with those of the adapter that replace or extend them.

        Raises:
            CheckpointError: the base model lacks a weight that the adapter changes, or it is quantised or has another shape.
        """
        keys = {self._key(name): name for name in stored}
        for key, (module, _) in self._pairs.items():
            base = stored.get(keys.get(key, ""))
            if base is None or (base.numel() and (not base.is_floating_point() or base.itemsize == 1)):
                raise CheckpointError(
                    f"the adapter changes {module}, which the base model does not store in 16 or 32 bits; give the base model "
                    "that is not quantised, LLM(base, adapter=folder)"
                )
            if base.numel() and tuple(base.shape) != self._shape(key):
                raise CheckpointError(
                    f"the adapter changes {module} of shape {list(self._shape(key))}, the base model has {list(base.shape)}; "
                    "give the base model that it was trained on, LLM(base, adapter=folder)"
                )
        found = dict(stored)
        for key, (name, tensor) in self._replaced.items():
            found[keys.get(key, name)] = tensor
        return found

    @property
    def changes_embeddings(self) -> bool:
        return _EMBEDDING in self._pairs or _EMBEDDING in self._replaced

    def merge(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights with the adapter merged in.

        A weight is merged panel by panel: summed in float32 and rounded once to the model's dtype.
        """
        left = dict(self._replaced)
        for name, tensor in weights:
            key = self._key(name)
            if key in self._replaced:
                left.pop(key, None)
                yield name, self._replaced[key][1]
            else:
                yield name, self._changed(key, tensor) if key in self._pairs else tensor
        yield from left.values()

    def _changed(self, key: str, weight: Tensor) -> Tensor:
        module, matrices = self._pairs[key]
        down, up = (matrices[letter].float().flatten(1) for letter in "AB")
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(module)), self._config["lora_alpha"])
        scale = low_rank_scale(alpha, len(down), self._config)
        if key in self._embeddings:
            down, up = up.T, down.T
        wide = weight.flatten(1)
        each = panel_rows(wide.shape[1])
        changed = torch.empty(wide.shape, dtype=torch.float32 if len(wide) <= each else self._dtype)
        for first in range(0, len(wide), each):
            part = slice(first, first + each)
            changed[part] = (up[part] @ down).mul_(scale).add_(wide[part])
        return changed.view(weight.shape)
