"""Weights that replace those of a checkpoint while an engine runs, under the names that checkpoints have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError, InputError
from ..checkpoints.weight_files import rename
from .interface import Model

_EMBEDDING, _HEAD = "language_model.embed_tokens.weight", "head.lm_head.weight"


class UpdatedWeights:
    """The tensors that have replaced tensors of the checkpoint since the model was loaded, on the host."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}  # by the stored name

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def stage(self, model: Model, headers: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Take tensors for the next `merge`, all or none. Earlier ones of other names stay.

        Args:
            model: on the meta device.
            headers: of `weight_files.read_headers`.
            weights: names as the checkpoint or transformers has them. A head that is tied may be given with its table.

        Raises:
            CheckpointError: a name is unknown, or the checkpoint stores another shape, or codes of a quantised weight.
            InputError: the model runs through transformers' classes.
        """
        if not hasattr(model, "convert_weights"):
            raise InputError("the weights of a model that runs through transformers cannot be updated", code="unsupported")
        by_canonical = {_canonical(model, name, header): name for name, header in headers.items()}
        staged, unknown = dict[str, Tensor](), list[str]()
        for name, tensor in weights.items():
            canonical = _canonical(model, name, tensor)
            stored = name if name in headers else by_canonical.get(canonical)
            if stored is not None:
                _check(name, tensor, headers[stored])
                staged[stored] = tensor
            elif canonical != _HEAD or not torch.equal(tensor, _table(model, weights, tensor)):
                unknown.append(name)
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise CheckpointError(
                f"the update holds {', '.join(unknown[:3])}{more}, which the checkpoint does not store; give names of the "
                "checkpoint's tensors"
            )
        self._tensors |= staged

    def merge(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's weights with those that have replaced them."""
        for name, tensor in weights:
            yield name, self._tensors.get(name, tensor)


def _canonical(model: Any, name: str, tensor: Tensor) -> str:
    """Return the name of a tensor in the model. It identifies tensors of several spellings."""
    converted = model.convert_weights([(name, torch.empty(tensor.shape, device="meta"))])
    try:
        names = [rename(one, model.prefixes) for one, _ in converted]
    except (IndexError, ValueError, RuntimeError):  # a shape that it cannot convert
        names = []
    return " ".join(names) or name


def _table(model: Model, weights: Mapping[str, Tensor], default: Tensor) -> Tensor:
    """Return the update's token embeddings, to which a head may be tied. `default`: has another shape than any table."""
    tables = (tensor for name, tensor in weights.items() if _canonical(model, name, tensor) == _EMBEDDING)
    return next(tables, default.new_empty(0))


def _check(name: str, tensor: Tensor, header: Tensor) -> None:
    if header.numel() and (not header.is_floating_point() or header.itemsize == 1):
        kind = str(header.dtype).removeprefix("torch.")
        raise CheckpointError(f"the update holds {name}, which the checkpoint stores in {kind}; load the model that is not "
                              "quantised, with the option quantization")  # fmt: skip
    if header.numel() and tensor.shape != header.shape:
        raise CheckpointError(f"{name} of the update has shape {list(tensor.shape)}, the model needs {list(header.shape)}")
