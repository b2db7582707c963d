"""Gives each Linear of a model the formats of its shards, and joins stored tensors to quantised weights while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, cast

from torch import Tensor, nn

from ..callers.errors import CheckpointError
from ..checkpoints.formats.base import QuantizationConfig, WeightFormat
from ..checkpoints.weight_files import rename
from ..kernels.linear.grouped import QuantizedWeight
from .layers.basic import Converter, Convertible, Renamed
from .layers.linear import Linear
from .stored_experts import ENDINGS, ExpertStack, stacks

_UNUSED = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point", "output_scale", "prob_scale", "prob_output_scale")
"""Last parts of the names of scales for caches and attention, which do not change weights."""


class _Renaming(Protocol):
    """The part of a model that turns stored names into canonical ones."""

    prefixes: Sequence[tuple[str, str]]

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Formats:
    """The quantised weights of a model.

    Args:
        modules: canonical path of a module -> its format.
        parts: canonical name of a stored tensor -> its module and the last part of its name.
        stored: canonical path of a module -> its stored tensors on the meta device by the last part of their name.
        stacks: canonical path of a module -> the experts whose weights it stores.
    """

    modules: Mapping[str, WeightFormat]
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stored: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    stacks: Mapping[str, ExpertStack] = field(default_factory=dict)


class Joiner:
    """Joins the stored tensors of each quantised module to one weight."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._pending: dict[str, dict[str, Tensor]] = {}

    def join(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor | QuantizedWeight]]:
        """Take a tensor by its canonical name. Return it or, for the last tensor of a module, the module's weights.

        Raises:
            CheckpointError: the tensors do not make a weight.
        """
        if name.rpartition(".")[2] in _UNUSED:
            return []
        if name not in self._formats.parts:
            return [(name, tensor)]
        module, part = self._formats.parts[name]
        parts = self._pending.setdefault(module, {})
        parts[part] = tensor
        if len(parts) < len(self._formats.stored[module]):
            return []
        return _decode(self._formats.modules[module], module, self._pending.pop(module), self._formats.stacks.get(module))


def _decode(
    weight_format: WeightFormat, module: str, parts: Mapping[str, Tensor], stack: ExpertStack | None
) -> list[tuple[str, Tensor | QuantizedWeight]]:
    """Return names and weights of a module. Raise CheckpointError for tensors that are missing or do not fit each other."""
    try:
        return [(f"{module}.weight", weight_format.decode(parts))] if stack is None else list(stack.split(weight_format, parts))
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"the quantised tensors of {module} ({', '.join(sorted(parts))}) make no weight ({reason})"
        ) from None


def assign(model: nn.Module, quantization: QuantizationConfig, stored: Mapping[str, Tensor] | None) -> None:
    """Set the formats of a model that was built in `deferred_weights`, and allocate the weights of its other layers.

    A layer with a tensor that is split while it is read is not quantised: its weights are dequantised.

    Args:
        stored: all stored tensors on the meta device by name; those of a missing file have the shape `[0]`. None: no weights.

    Raises:
        CheckpointError: a scheme is unknown, a Linear is quantised in part, or a stored tensor has the wrong shape.
    """
    has_shapes = stored is not None and all(tensor.numel() for tensor in stored.values())
    formats = (_by_tensors if has_shapes else _by_config)(model, quantization, stored or {})
    converted = _converters(model)
    for path, layer in model.named_modules():
        if not isinstance(layer, Linear):
            continue
        names = layer.weight_names(path)
        splits = any(name in converted and not isinstance(converted[name], Renamed) for name in names)
        by_name = {name: None if splits else formats.modules.get(name.removesuffix(".weight")) for name in names}
        formatted = {name: weight_format for name, weight_format in by_name.items() if weight_format is not None}
        if formatted and len(formatted) < len(by_name):
            wide = next(name for name in by_name if name not in formatted)
            raise CheckpointError(f"{next(iter(formatted))} is quantised and {wide} is not; both are parts of one product")
        for (name, weight_format), rows in zip(formatted.items(), layer.stored_outputs(), strict=False):
            module = name.removesuffix(".weight")
            _check_shapes(module, weight_format.layout(rows, layer.weight.shape[1]), formats.stored.get(module))
        layer.allocate(formatted)
    model.formats = formats  # type: ignore[assignment]


def _check_shapes(module: str, needed: Mapping[str, Tensor], stored: Mapping[str, Tensor] | None) -> None:
    """Raise CheckpointError if a stored tensor is missing or has another shape than the config needs.

    A needed tensor that is not on the meta device describes the shape in bytes or numbers; only its name is checked.
    """
    if stored is None:
        return
    for part, tensor in needed.items():
        if part not in stored:
            raise CheckpointError(f"the checkpoint lacks {module}.{part}; it does not fit its config.json")
        if tensor.is_meta and stored[part].shape != tensor.shape:
            shapes = f"has shape {list(stored[part].shape)}, the config needs {list(tensor.shape)}"
            raise CheckpointError(f"{module}.{part} {shapes}")


def _by_config(model: nn.Module, quantization: QuantizationConfig, stored: Mapping[str, Tensor]) -> Formats:
    """Return the formats as quantization_config states them, for a folder without weight files.

    `stored`: the tensors that an index names, whose shapes are not known. They tell which modules are quantised.
    """
    prefixes, modules = getattr(model, "prefixes", ()), {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and not layer.exact:
            for name in layer.weight_names(path):
                module = name.removesuffix(".weight")
                old = [before + name[len(after) :] for before, after in prefixes if name.startswith(after)]
                weight_format = quantization.format_of(
                    [module, *(shard_name.removesuffix(".weight") for shard_name in old)], None
                )
                if weight_format is not None:
                    modules[module] = weight_format
    if not stored:
        return Formats(modules)
    parts_of_modules, stacked = _stored_parts(model, quantization, stored)[1], stacks(model)
    quantised = {module for module, parts in parts_of_modules.items() if parts.keys() != {"weight"}}
    decoded = {
        shard for module in quantised & stacked.keys() for shards in stacked[module].modules for shard in shards
    } | quantised
    parts = {name: (module, part) for module in quantised for part, (name, _) in parts_of_modules[module].items()}
    return Formats({module: weight_format for module, weight_format in modules.items() if module in decoded}, parts, {},
                   {module: stacked[module] for module in quantised & stacked.keys()})  # fmt: skip


def _by_tensors(model: nn.Module, quantization: QuantizationConfig, stored: Mapping[str, Tensor]) -> Formats:
    """Return the formats of the modules that have quantised tensors in the weight files."""
    (names, parts_of_modules), stacked = _stored_parts(model, quantization, stored), stacks(model)
    modules: dict[str, WeightFormat] = {}
    parts: dict[str, tuple[str, str]] = {}
    stored_parts: dict[str, dict[str, Tensor]] = {}
    for module, several in parts_of_modules.items():
        tensors, stack = {part: tensor for part, (_, tensor) in several.items()}, stacked.get(module)
        weight_format = quantization.format_of([names[module], module], tensors if stack is None else stack.parts(0, tensors))
        if weight_format is not None:
            modules[module], stored_parts[module] = weight_format, tensors
            if stack is not None:
                modules |= {shard: weight_format for shards in stack.modules for shard in shards}
            parts |= {canonical: (module, part) for part, (canonical, _) in several.items()}
    return Formats(modules, parts, stored_parts, {module: stacked[module] for module in stored_parts if module in stacked})


def _stored_parts(
    model: nn.Module, quantization: QuantizationConfig, stored: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, dict[str, tuple[str, Tensor]]]]:
    """Group tensors by module. Return module -> stored name, and module -> part -> (canonical name, tensor)."""
    naming = cast(_Renaming, model)
    renamed, stacked = _renamed(model), stacks(model)
    ends = {stem + end: (stem, part) for stem in stacked for end, part in ENDINGS.items() if part in quantization.parts}
    parts_of_modules: dict[str, dict[str, tuple[str, Tensor]]] = {}  # module -> part -> canonical name, tensor
    names: dict[str, str] = {}  # module -> its stored name
    for name, tensor in naming.convert_weights(stored.items()):
        canonical = rename(name, naming.prefixes)
        part = next((part for part in quantization.parts if canonical.endswith(f".{part}")), None)
        if canonical in ends:
            module, part = ends[canonical]
            parts_of_modules.setdefault(module, {})[part] = canonical, tensor
            names[module] = name.removesuffix(canonical[len(module) :])
        elif part is not None:
            module = canonical.removesuffix(f".{part}")
            module = renamed.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")
            parts_of_modules.setdefault(module, {})[part] = canonical, tensor
            names[module] = name.removesuffix(f".{part}")
    return names, parts_of_modules


def _renamed(model: nn.Module) -> dict[str, str]:
    """Map names of tensors that converters only rename to their canonical names."""
    return {name: converter.name for name, converter in _converters(model).items() if isinstance(converter, Renamed)}


def _converters(model: nn.Module) -> dict[str, Converter]:
    """Return the converter of each tensor that has one."""
    convertible = ((path, module) for path, module in model.named_modules() if isinstance(module, Convertible))
    return dict(chain.from_iterable(module.converters(path) for path, module in convertible))
