"""Merges a LoRA adapter, in the layout of peft, into the weights of its base model while they are read.

Sources: arXiv 2106.09685, and 2402.09353 for DoRA; the tensor names and scales of peft.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from ..kernels.linear.grouped import panel_rows
from .adapters import adapter_path, check_settings, low_rank_scale, patterns
from .expert_adapters import ExpertMatrices, changed_expert, changed_experts, expert_of, fits, split_experts, tensor_of_experts
from .weight_files import rename

_READ = ("target_modules", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
         "exclude_modules", "ensure_weight_tying", "use_dora", "target_parameters", "experts_shared_outer_loras",
         "trainable_token_indices")  # fmt: skip
"""Settings that only say which tensors the adapter has, `alpha_pattern`, `use_dora` and `trainable_token_indices`."""
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
_MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(\.default)?(\.weight)?")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(\.default)?")
_TASK = re.compile(r"(.+\.lora_[AB](?:\.default)?)\.([^.]+)\.weight")
_PACKED = re.compile(r"\.(qweight|weight_packed|qzeros|scales|weight_scale|weight_scale_inv|weight_shape|g_idx)$")
"""Tensors that quantised checkpoints have in the place of a weight, or beside it."""
_UNKNOWN = re.compile(r"lora_|trainable_tokens|token_adapter")
ONLY_LAYERS = (
    "and not only linear layers outside experts, norms of whole rows, token embeddings and the head, which is not supported "
    "for adapters per request; merge it into the model"
)
_MAX_TOKENS = 1 << 31  # no vocabulary is larger
_EMBEDDING = "language_model.embed_tokens.weight"
_OF_DECODER = re.compile(r"(?:(?:model|language_model|text_model|llm|thinker)\.)*((?:layers|embed_tokens|norm)\..+)")
"""Names of a decoder's tensors, alone or in a model with encoders, in the layouts of transformers 4 and 5 and of publishers."""
_OF_HEAD = re.compile(r"(?:(?:model|language_model|text_model|llm|thinker)\.)*(lm_head\..+)")


def weight_of(stored: str) -> str:
    """Return the name of the weight to which a stored tensor belongs, which is the tensor's own unless it is quantised."""
    return _PACKED.sub(".weight", stored)


def tensors_of_task(tensors: Iterable[tuple[str, Tensor]], task: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors. Where it has matrices for several tasks, yield those of one, without the task's name."""
    for name, tensor in tensors:
        match = None if task is None else _TASK.fullmatch(name)
        if match is None:
            yield name, tensor
        elif match[2] == task:
            yield f"{match[1]}.weight", tensor


@dataclass(frozen=True, eq=False)
class LowRankPair:
    """Two matrices whose product an adapter adds to a weight: `W + up @ down * scale`.

    With a magnitude (DoRA), each row of the sum is then scaled to have this length.

    Args:
        module: its name in the adapter.
        weight: the stored name of the weight.
        down: `[rank, in]`; for all experts of a mixture `[experts, rank, in]`, or `[1, rank, in]` if they share it.
        up: `[out, rank]`; for all experts `[experts, out, rank]` or `[1, out, rank]`. magnitude: `[out]`, or None.
    """

    module: str
    weight: str
    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReplacedWeight:
    """A tensor of an adapter that replaces one of the base model.

    Args:
        module: its name in the adapter.
        stored: the stored name of the base model's tensor.
        is_base: the adapter says that it is the base model's own, which peft stores beside pairs of tables.
        token_ids: the tokens whose rows it replaces, in order; () for the whole tensor.
    """

    module: str
    stored: str
    tensor: Tensor
    is_base: bool = False
    token_ids: tuple[int, ...] = ()


class MergedAdapter:
    """An adapter: weights become `W + B A * scale`, and modules of `modules_to_save` are replaced.

    Args:
        raw: adapter_config.json.
        tensors: of the adapter's file by name; on the meta device for `add_headers` only.
        prefixes: (stored, canonical) prefixes of the model's tensor names. Two names match if they become the same.
        dtype: of the model.
        transposed: square weights of all experts are stored as `[experts, in, out]`.

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
        transposed: bool = False,
    ) -> None:
        check_settings(raw, _READ)
        self._config, self._prefixes, self._dtype = {"lora_alpha": 8, **raw}, prefixes, dtype
        self._transposed = transposed
        self._alphas = patterns(raw, "alpha_pattern")
        self._replaced: dict[str, tuple[str, Tensor]] = {}  # key -> name, tensor
        self._pairs: dict[str, tuple[str, dict[str, Tensor]]] = {}  # key -> module, matrices
        self._magnitudes: dict[str, tuple[str, Tensor]] = {}  # key -> name, and the lengths of the changed weight's rows
        self._tokens: dict[str, tuple[str, tuple[int, ...], Tensor]] = {}  # key -> module, tokens, and their rows
        self._embeddings, self._base_layers = set[str](), set[str]()
        self._experts: dict[str, ExpertMatrices] = {}
        self._spellings: dict[str, str] = {}  # another key of a tensor of the decoder -> the key in the adapter
        experts, others = split_experts(raw, tensors)
        for matrices in experts:
            if self._config.get("use_dora"):
                raise CheckpointError(
                    f"the adapter changes {matrices.module} with DoRA, which is not supported for tensors of all experts"
                )
            self._experts[self._adapter_key(matrices.stored)] = matrices
        for name, tensor in others:
            path = _WRAPPERS.sub("", adapter_path(name))
            matrix, magnitude = _MATRIX.fullmatch(path), _MAGNITUDE.fullmatch(path)
            if magnitude is not None:
                self._magnitudes[self._adapter_key(f"{magnitude[1]}.weight")] = name, tensor
                continue
            if (rows := _TOKENS.fullmatch(path)) is not None:
                token_ids = _token_ids(raw, rows[1], tensor)
                self._tokens[self._adapter_key(f"{rows[1]}.weight")] = rows[1], token_ids, tensor
                continue
            if matrix is None:
                if _UNKNOWN.search(path):
                    raise CheckpointError(f"the adapter holds {name}, which is not supported; merge it into the model")
                key = self._adapter_key(path)
                self._replaced[key] = path, tensor
                self._base_layers |= {key} if ".base_layer." in name else set()
                continue
            module, embedding, letter, *_ = matrix.groups()
            key = self._adapter_key(f"{module}.weight")
            self._pairs.setdefault(key, (module, {}))[1][letter] = tensor
            self._embeddings |= {key} if embedding else set()
        self._check_ranks()
        self._check_magnitudes()
        for module, _, _ in (rows for key, rows in self._tokens.items() if key in self._pairs or key in self._replaced):
            raise CheckpointError(f"the adapter changes {module} and has rows of single tokens for it, which is not supported")
        if raw.get("trainable_token_indices") and not self._tokens:
            raise CheckpointError("the adapter has trainable_token_indices, but no trainable_tokens_delta with their rows")

    def _check_ranks(self) -> None:
        for module, matrices in self._pairs.values():
            ranks = {
                low.shape[0] if letter == "A" else low.shape[1:].numel() for letter, low in matrices.items() if low.ndim > 1
            }
            if len(matrices) < 2 or len(ranks) != 1 or 0 in ranks or min(low.ndim for low in matrices.values()) < 2:
                raise CheckpointError(f"the adapter's lora_A and lora_B of {module} are not two matrices of one rank")

    def _check_magnitudes(self) -> None:
        """Raise CheckpointError unless every pair has a magnitude of its length with `use_dora`, and none without."""
        wanted = self._pairs.keys() if self._config.get("use_dora") else set[str]()
        for key, (name, tensor) in self._magnitudes.items():
            if key not in wanted:
                raise CheckpointError(f"the adapter holds {name}, which has no matrices or needs use_dora=true")
            outputs = self._pairs[key][1]["B"].shape[0]
            if tensor.numel() != outputs:
                raise CheckpointError(f"the adapter's {name} has {tensor.numel()} numbers, and lora_B has {outputs} outputs")
        for key in wanted:
            module, matrices = self._pairs[key]
            if key not in self._magnitudes:
                raise CheckpointError(f"the adapter has use_dora=true, and no lora_magnitude_vector of {module}")
            if key in self._embeddings or max(low.ndim for low in matrices.values()) > 2:
                reason = "DoRA of embeddings and convolutions is not supported; merge it into the model with peft"
                raise CheckpointError(f"the adapter changes {module}: {reason}")

    def _key(self, name: str) -> str:
        return rename(name, self._prefixes).removeprefix("model.")

    def _adapter_key(self, name: str) -> str:
        """Return the key of an adapter's tensor. Trained alone, a decoder has other names than in a model with encoders."""
        key = self._key(name)
        for pattern, part in (_OF_DECODER, "language_model"), (_OF_HEAD, "head"):
            if match := pattern.fullmatch(name):
                self._spellings[f"{part}.{match[1]}"] = key
        return key

    def _stored_key(self, name: str) -> str:
        """Return the key of a tensor of the base model, as the adapter spells it."""
        key = self._key(name)
        is_in_adapter = any(key in keys for keys in (self._pairs, self._experts, self._replaced, self._tokens))
        return key if is_in_adapter else self._spellings.get(key, key)

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
        keys = {self._stored_key(name): name for name in stored}
        packed = {self._stored_key(weight_of(name)) for name in stored if _PACKED.search(name)}
        shapes = {key: (module, self._shape(key)) for key, (module, _) in self._pairs.items()}
        shapes |= {key: (module, (0, rows.shape[1])) for key, (module, _, rows) in self._tokens.items()}
        for key, (module, shape) in shapes.items():
            base = self._replaced[key][1] if key in self._replaced else stored.get(keys.get(key, ""))
            if base is None and key not in packed:
                raise CheckpointError(
                    f"the adapter changes {module}, and the base model has no such module; give the base model that it was "
                    "trained on, <<base_with_adapter>>"
                )
            if base is None or (base.numel() and (not base.is_floating_point() or base.itemsize == 1)):
                raise CheckpointError(
                    f"the adapter changes {module}, which the base model does not store in 16 or 32 bits; give the base model "
                    "that is not quantised, <<base_with_adapter>>"
                )
            if key in self._tokens and base.numel():
                check_token_rows(module, self._tokens[key][1], shape[1], base.shape)
            elif base.numel() and tuple(base.shape) != shape:
                raise CheckpointError(
                    f"the adapter changes {module} of shape {list(shape)}, the base model has {list(base.shape)}; "
                    "give the base model that it was trained on, <<base_with_adapter>>"
                )
        self._check_experts(stored)
        headers = dict(stored)
        for key, (name, tensor) in self._replaced.items():
            headers[keys.get(key, name)] = tensor
        return headers

    def _check_experts(self, stored: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError if the base model lacks weights that matrices of all experts change, or stores other shapes."""
        numbers: dict[str, set[int | None]] = {matrices.module: set() for matrices in self._experts.values()}
        for name, tensor in stored.items():
            if (change := self._change_of_experts(name)) is None:
                continue
            matrices, number, part = change
            is_wide = tensor.is_floating_point() and tensor.itemsize > 1
            if tensor.numel() and not (is_wide and fits(matrices, tensor, number, part)):
                raise CheckpointError(
                    f"the adapter changes {matrices.module}, and the base model's {name} has another shape or is quantised; "
                    "give the base model that it was trained on, <<base_with_adapter>>"
                )
            numbers[matrices.module].add(number)
        for matrices in self._experts.values():
            stored_experts, experts = numbers[matrices.module], max(len(matrices.down), len(matrices.up))
            if not stored_experts or (None not in stored_experts and len(stored_experts) < experts):
                raise CheckpointError(
                    f"the adapter changes {experts} experts of {matrices.module}, and the base model lacks some of them; give "
                    "the base model that it was trained on, <<base_with_adapter>>"
                )

    def _change_of_experts(self, name: str) -> tuple[ExpertMatrices, int | None, str] | None:
        """Return the matrices of all experts that change a stored weight, and the expert and projection of this weight.

        The expert is None for a weight of all experts. If no such matrices change the weight, return None.
        """
        key = self._stored_key(tensor_of_experts(name))
        if key in self._experts:
            return self._experts[key], None, ""
        expert = expert_of(name) if self._experts else None
        if expert is None:
            return None
        number, part, tensors = expert
        key = next((key for tensor in tensors if (key := self._stored_key(tensor)) in self._experts), "")
        return (self._experts[key], number, part) if key else None

    def pairs(self, stored: Collection[str]) -> Iterator[LowRankPair]:
        """Yield the adapter's pairs, for weights that stay as they are. `stored`: the base model's tensors.

        A pair of a table of embeddings is that of its weight `[vocab, dim]`.

        Raises:
            CheckpointError: the base model lacks a weight that a pair changes.
        """
        names = {self._stored_key(name): name for name in map(weight_of, stored)}
        for key, (module, matrices) in self._pairs.items():
            down, up = (matrices[letter].flatten(1) for letter in "AB")
            if key in self._embeddings:
                down, up = up.T, down.T
            _, magnitude = self._magnitudes.get(key, ("", None))
            flat = None if magnitude is None else magnitude.flatten()
            yield LowRankPair(module, _found(module, key, names), down, up, self._scale(module, len(down)), flat)
        for key, experts in self._experts.items():
            scale = self._scale(experts.module, experts.down.shape[1])
            yield LowRankPair(experts.module, _found(experts.module, key, names), experts.down, experts.up, scale)

    def replaced(self, stored: Collection[str]) -> Iterator[ReplacedWeight]:
        """Yield the tensors that replace those of the base model. `stored`, errors: as in `pairs`."""
        names = {self._stored_key(name): name for name in map(weight_of, stored)}
        for key, (name, tensor) in self._replaced.items():
            yield ReplacedWeight(name, _found(name, key, names), tensor, key in self._base_layers)
        for key, (name, token_ids, tensor) in self._tokens.items():
            yield ReplacedWeight(name, _found(name, key, names), tensor, token_ids=token_ids)

    def _scale(self, module: str, rank: int) -> float:
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(module)), self._config["lora_alpha"])
        return low_rank_scale(alpha, rank, self._config)

    @property
    def changes_embeddings(self) -> bool:
        changed = self._pairs.keys() | self._replaced.keys()
        return _EMBEDDING in changed or self._spellings.get(_EMBEDDING) in changed

    def merge(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's weights with the adapter merged in.

        A weight is merged panel by panel: summed in float32 and rounded once to the model's dtype.
        """
        left = dict(self._replaced)
        for name, tensor in weights:
            key = self._stored_key(name)
            if key in self._replaced:
                left.pop(key, None)
                tensor = self._replaced[key][1]
            changed = self._changed(key, tensor) if key in self._pairs else self._changed_experts(name, tensor)
            if key in self._tokens:
                _, token_ids, rows = self._tokens[key]
                changed = changed.index_copy(0, torch.tensor(token_ids), rows.to(changed.dtype))
            yield name, changed
        yield from left.values()

    def _changed(self, key: str, weight: Tensor) -> Tensor:
        module, matrices = self._pairs[key]
        down, up = (matrices[letter].float().flatten(1) for letter in "AB")
        scale = self._scale(module, len(down))
        if key in self._embeddings:
            down, up = up.T, down.T
        wide = weight.flatten(1)
        each = panel_rows(wide.shape[1])
        changed = torch.empty(wide.shape, dtype=torch.float32 if len(wide) <= each else self._dtype)
        for first in range(0, len(wide), each):
            part = slice(first, first + each)
            changed[part] = self._scaled(key, (up[part] @ down).mul_(scale).add_(wide[part]), part)
        return changed.view(weight.shape)

    def _changed_experts(self, name: str, weight: Tensor) -> Tensor:
        """Add the products of matrices of all experts to a stored weight, if they change it."""
        if (change := self._change_of_experts(name)) is None:
            return weight
        matrices, number, part = change
        scale = self._scale(matrices.module, matrices.down.shape[1])
        if number is None:
            return changed_experts(matrices, scale, weight, self._transposed, self._dtype)
        return changed_expert(matrices, scale, number, part, weight)

    def _scaled(self, key: str, changed: Tensor, rows: slice) -> Tensor:
        """Scale rows of a changed weight in place to their magnitudes, if it has them."""
        if key not in self._magnitudes:
            return changed
        _, magnitude = self._magnitudes[key]
        return changed.mul_((magnitude.float().flatten()[rows] / changed.norm(dim=1))[:, None])


def check_token_rows(module: str, token_ids: Sequence[int], width: int, table: Sequence[int]) -> None:
    """Raise CheckpointError unless rows of these tokens, of this width, fit a table of this shape."""
    if len(table) != 2 or width != table[1] or max(token_ids) >= table[0]:
        raise CheckpointError(
            f"the adapter's {module} has rows of {width} numbers for tokens up to {max(token_ids)}, and the base model's shape "
            f"is {list(table)}; give the base model that it was trained on, <<base_with_adapter>>"
        )


def _token_ids(raw: Mapping[str, Any], module: str, rows: Tensor) -> tuple[int, ...]:
    """Return the tokens whose rows of a module the adapter has trained, as many as `rows`."""
    ids = raw.get("trainable_token_indices")
    if isinstance(ids, Mapping):
        ids = next((own for name, own in ids.items() if f".{module}".endswith(f".{name}")), None)
    is_list = isinstance(ids, list) and all(type(token) is int and 0 <= token < _MAX_TOKENS for token in ids)
    if not is_list or not ids or rows.ndim != 2 or not len({*ids}) == len(ids) == len(rows):
        shape = list(rows.shape)
        raise CheckpointError(
            f"the adapter's trainable_tokens_delta of {module} has shape {shape}, but trainable_token_indices does not name as "
            "many tokens"
        )
    return tuple(ids)


def _found(module: str, key: str, names: Mapping[str, str]) -> str:
    if key not in names:
        raise CheckpointError(
            f"the adapter changes {module}, and the base model has no such module; give an adapter of this model"
        )
    return names[key]
