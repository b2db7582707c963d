"""LoRA adapters that come with a checkpoint, in the layout of peft (adapter_config.json, adapter_model.safetensors).

The family's processor decides which prompts use an adapter.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ..mm.errors import ConfigError
from .config import positive_int
from .decoder_model import DecoderModel
from .interface import Model
from .layers.adapter import AdapterSpec, LowRank
from .layers.linear import Linear
from .layers.moe import Mixture, ModalityMixture
from .patterns import compile_pattern

_READ = {"peft_type", "r", "lora_alpha", "bias", "use_rslora", "init_lora_weights"}
_WITHOUT_EFFECT = {  # keys about training or names, or parameters of settings that are refused
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
_MAX_RANK = 1 << 16
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, True, None),
    "init_lora_weights": (True, False, None, "gaussian"),  # other methods change the base weights
}


def adapter_spec(name: str, raw: Mapping[str, Any]) -> AdapterSpec:
    """Read a raw adapter_config.json; `name` as in AdapterSpec.

    Raises:
        ConfigError: a setting is unsupported or invalid; the message names it.
    """
    check_settings(raw, ("target_modules",))
    config = {"r": 8, "lora_alpha": 8, **raw}
    rank = positive_int(config, "r", "adapter_config.json")
    if rank > _MAX_RANK:
        raise _refused("r", rank)
    scale, targets = low_rank_scale(config["lora_alpha"], rank, config), raw.get("target_modules")
    if isinstance(targets, str) and targets:
        return AdapterSpec(name, rank, scale, (), patterns({"target_modules": {targets: None}}, "target_modules")[0][0])
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) and target for target in targets):
        raise _refused("target_modules", targets)
    return AdapterSpec(name, rank, scale, tuple(targets))


def check_settings(raw: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise ConfigError for a setting of adapter_config.json that is not supported. `read`: settings the caller supports."""
    for key, known in _SUPPORTED.items():
        if raw.get(key, known[0]) not in known:
            raise _refused(key, raw[key])
    for key, value in raw.items():
        if value and key not in _READ | _WITHOUT_EFFECT and key not in read:
            raise _refused(key, value)


def low_rank_scale(alpha: object, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's output. Raise ConfigError for an invalid `lora_alpha`."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise _refused("lora_alpha", alpha)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def patterns(raw: Mapping[str, Any], key: str) -> list[tuple[re.Pattern[str], object]]:
    """Return the regular expressions under this key, each for the end of a module name, with their values."""
    try:
        return [
            (re.compile(rf"(.*\.)?({compile_pattern(pattern).pattern})$"), value)
            for pattern, value in (raw.get(key) or {}).items()
        ]
    except (AttributeError, TypeError, ValueError, re.error):
        raise _refused(key, raw[key]) from None


def attach(model: Model, specs: Sequence[AdapterSpec]) -> None:
    """Add the adapters to the model's decoder. Call it before weights are loaded.

    Raises:
        ConfigError: the model supports no adapters, or an adapter has no target in its decoder.
    """
    if specs and not isinstance(model, DecoderModel):
        raise ConfigError("this model supports no adapters (adapter_config.json); merge the adapter into the model")
    for number, spec in enumerate(specs):
        assert isinstance(model, DecoderModel)
        targets = [shard for shard in _shards(model.language_model, "language_model") if _is_target(shard[1], spec)]
        if not targets:
            wanted = ", ".join(spec.targets) or spec.pattern
            raise ConfigError(f"adapter_config.json targets {wanted}; the decoder has no such layer")
        for layer, stem, start, rows in targets:
            layer.add_adapter(LowRank(stem, layer, rows, spec, number, model.adapter_mask), start)
    if isinstance(model, DecoderModel):
        model.adapters = tuple(spec.name for spec in specs)


def _shards(root: nn.Module, path: str) -> Iterator[tuple[Linear, str, int, int]]:
    """Yield each shard of every Linear: the layer, the shard's canonical name, its first output and its number of outputs.

    Experts are left out, because the rows that they get are not those of the step.
    """
    if isinstance(root, Linear):
        start = 0
        for name, rows in root.shards.items():
            yield root, f"{path.rpartition('.')[0]}.{name}", start, rows
            start += rows
    for name, child in root.named_children():
        if not isinstance(child, Mixture | ModalityMixture):
            yield from _shards(child, f"{path}.{name}")


def _is_target(name: str, spec: AdapterSpec) -> bool:
    if spec.pattern is not None:
        return spec.pattern.fullmatch(name) is not None
    return any(name.endswith(f".{target}") for target in spec.targets)


def _refused(key: str, value: object) -> ConfigError:
    return ConfigError(
        f"adapter_config.json has {key}={str(value)[:60]!r}, which is not supported; merge the adapter into the model"
    )
