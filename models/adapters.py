"""Adapters that come with a checkpoint: low-rank products added to some of a decoder's own. Knows no family.

They lie in the layout of peft, adapter_config.json and adapter_model.safetensors. Which prompts one computes is its family's to
say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..mm.errors import ConfigError
from .config import count
from .decoder_model import DecoderModel
from .interface import Model
from .layers.adapter import AdapterSpec, LowRank
from .layers.linear import Linear
from .layers.moe import Mixture, MixtureByKind

_READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora", "init_lora_weights"}
_OF_NO_WEIGHT = {  # of training, of names, or of a setting that is refused itself
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
_HIGHEST_RANK = 1 << 16  # above any layer's, and below what no memory holds
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, True, None),
    "init_lora_weights": (True, False, None, "gaussian"),  # others change the weights that the adapter is added to
}


def adapter_spec(name: str, given: Mapping[str, Any]) -> AdapterSpec:
    """What an adapter_config.json says; `name` as in AdapterSpec.

    Raises:
        ConfigError: a setting that is not computed here, by name, or one that makes no sense.
    """
    for key, known in _ONLY.items():
        if given.get(key, known[0]) not in known:
            raise _refused(key, given[key])
    for key, value in given.items():
        if value and key not in _READ | _OF_NO_WEIGHT:
            raise _refused(key, value)
    config = {"r": 8, "lora_alpha": 8, **given}
    rank, alpha, targets = count(config, "r", "adapter_config.json"), config["lora_alpha"], given.get("target_modules")
    if rank > _HIGHEST_RANK:
        raise _refused("r", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise _refused("lora_alpha", alpha)
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) and target for target in targets):
        raise _refused("target_modules", targets)
    return AdapterSpec(name, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), tuple(targets))


def attach(model: Model, specs: Sequence[AdapterSpec]) -> None:
    """Make room in the model's decoder for the adapters' weights, before any are read.

    Raises:
        ConfigError: a model that takes none, or an adapter that is for nothing in its decoder.
    """
    if specs and not isinstance(model, DecoderModel):
        raise ConfigError("adapter_config.json lies beside weights that take no adapter; merge it into the model")
    for number, spec in enumerate(specs):
        assert isinstance(model, DecoderModel)
        places = [place for place in _slices(model.language_model, "language_model") if _is_target(place[1], spec.targets)]
        if not places:
            raise ConfigError(f"adapter_config.json is for {', '.join(spec.targets)}; the decoder has no such product")
        for layer, stem, start, rows in places:
            assert layer.weight is not None, "weights are packed already"
            layer.add(LowRank(stem, layer.weight, rows, spec, number, model.switch), start)
    if isinstance(model, DecoderModel):
        model.adapters = tuple(spec.name for spec in specs)


def _slices(root: nn.Module, path: str) -> Iterator[tuple[Linear, str, int, int]]:
    """Each slice of every product: the layer, the slice's canonical name, its first row and its rows.

    Experts are left out: their rows are not those of the step.
    """
    if isinstance(root, Linear):
        start = 0
        for name, rows in root.slices.items():
            yield root, f"{path.rpartition('.')[0]}.{name}", start, rows
            start += rows
    for name, child in root.named_children():
        if not isinstance(child, Mixture | MixtureByKind):
            yield from _slices(child, f"{path}.{name}")


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name.endswith(f".{target}") for target in targets)


def _refused(key: str, value: object) -> ConfigError:
    return ConfigError(
        f"adapter_config.json has {key}={str(value)[:60]!r}, which is not computed here; merge the adapter into the model"
    )
