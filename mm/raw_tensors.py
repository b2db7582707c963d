"""Items that are named tensors, for models that read them unchanged. The layout is that of TerraTorch's config.json.

`pretrained_cfg.input.data` names the tensors: `{"pixel_values": {"type": "torch.Tensor", "shape": [6, 512, 512]}}`. "shared":
true marks a tensor that is the same for all items of an encoder call. `pretrained_cfg.output.shape` is the shape of an item's
result; without it, the result is a map of classes of the size of the first tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import ConfigError, MediaError, short_repr, typed
from .types import EmbeddingItem


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one tensor of an item, and whether all items of an encoder call share it."""

    shape: tuple[int, ...]
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a tensor of config.json has the shape {list(self.shape)}; its axes must be at least 1")


@dataclass(frozen=True)
class RawTensors:
    """Format of the items of a model: the tensors of an item, and the shape of its result.

    Each row along the last axis of the result is an encoder row.
    """

    tensors: Mapping[str, TensorSpec]
    output: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.output or min(self.output) < 1:
            raise ConfigError(f"the result's shape in config.json is {list(self.output)}; its axes must be at least 1")

    @property
    def rows(self) -> int:
        return prod(self.output[:-1])

    @property
    def numbers(self) -> int:
        """Return how many numbers all tensors of an item hold together."""
        return sum(prod(spec.shape) for spec in self.tensors.values())


def read_raw_tensors(config: Mapping[str, Any]) -> RawTensors:
    """Read the format from config.json. Raise ConfigError if config.json does not describe it."""
    settings: Any = config.get("pretrained_cfg")
    try:
        data = dict(settings["input"]["data"])
        specs = {name: TensorSpec(tuple(map(int, entry["shape"])), bool(entry.get("shared"))) for name, entry in data.items()}
        if "output" in settings:
            return RawTensors(specs, tuple(map(int, settings["output"]["shape"])))
        classes = int(settings["model"]["init_args"]["model_args"]["num_classes"])
        return RawTensors(specs, (classes, *next(iter(specs.values())).shape[-2:]))
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        reason = f"pretrained_cfg in config.json does not describe the model's tensors ({type(error).__name__}: {error})"
        raise ConfigError(f"{reason}; it needs input.data, and output.shape or the number of classes") from None


def read_tensor_items(modality: str, value: object, spec: RawTensors) -> list[EmbeddingItem]:
    """Return the items of a mapping of tensors, or of a list of such mappings.

    Raises:
        MediaError: a tensor is missing or unknown, has another shape, or is not finite.
    """
    several = value if isinstance(value, list | tuple) else [value]
    return [EmbeddingItem(modality, _read_item(modality, index, tensors, spec)) for index, tensors in enumerate(several)]


def _read_item(modality: str, index: int, value: object, spec: RawTensors) -> dict[str, Tensor]:
    names = ", ".join(spec.tensors)
    if not isinstance(value, Mapping):
        raise MediaError(modality, index, f"it must be a mapping with the tensors {names}, not {typed(value)}")
    wrong = [name for name in {**value, **spec.tensors} if name not in value or name not in spec.tensors]
    if wrong:
        raise MediaError(modality, index, f"{short_repr(wrong[0], 40)} is missing or unknown; the model's tensors are {names}")
    return {name: _read_tensor(modality, index, name, value[name], tensor_spec) for name, tensor_spec in spec.tensors.items()}


def _read_tensor(modality: str, index: int, name: str, value: object, spec: TensorSpec) -> Tensor:
    """Return a dense float32 copy of a valid tensor; raise MediaError for others."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple | float | int):
        raise MediaError(modality, index, f"{name} must be a tensor, not {typed(value)}")
    try:
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True).contiguous()
    except (TypeError, ValueError, RuntimeError):
        raise MediaError(modality, index, f"{name} is not a regular array of numbers") from None
    if tuple(tensor.shape) != spec.shape:
        raise MediaError(modality, index, f"{name} must have the shape {list(spec.shape)}, not {list(tensor.shape)}")
    if not bool(tensor.isfinite().all()):
        raise MediaError(modality, index, f"{name} holds NaN or infinite values; give finite ones")
    return tensor
