"""The settings of LoRA adapters in the layout of peft (adapter_config.json), and the names of their tensors."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..callers.errors import ConfigError
from .config import positive_int
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


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter of a checkpoint.

    Args:
        name: its folder below the checkpoint's, "." for the checkpoint's own folder; or its key in `stored_adapters`.
        scale: factor of its output.
        targets: it applies to the shards whose names end in one of these.
        pattern: it applies to the shards whose whole canonical names match this, instead.
    """

    name: str
    rank: int
    scale: float
    targets: tuple[str, ...]
    pattern: re.Pattern[str] | None = None


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
        raise _invalid("target_modules", targets, "a name, a pattern or a list of names")
    return AdapterSpec(name, rank, scale, tuple(targets))


def check_settings(raw: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise ConfigError for a setting of adapter_config.json that is not supported. `read`: settings the caller supports."""
    for key, supported in _SUPPORTED.items():
        if raw.get(key, supported[0]) not in supported:
            raise _refused(key, raw[key])
    for key, value in raw.items():
        if value and key not in _READ | _WITHOUT_EFFECT and key not in read:
            raise _refused(key, value)


def low_rank_scale(alpha: object, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's output. Raise ConfigError for an invalid `lora_alpha`."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise _invalid("lora_alpha", alpha, "a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def patterns(raw: Mapping[str, Any], key: str) -> list[tuple[re.Pattern[str], object]]:
    """Return the regular expressions under this key, each for the end of a module name, with their values."""
    try:
        return [
            (re.compile(rf"(.*\.)?({compile_pattern(pattern).pattern})$"), value)
            for pattern, value in (raw.get(key) or {}).items()
        ]
    except (AttributeError, TypeError, ValueError, re.error):
        raise _invalid(key, raw[key], "regular expressions of names that are matched in linear time") from None


def tensor_name(stem: str, letter: str, adapter: str) -> str:
    """Return the canonical name of an adapter's matrix "A" `[rank, in]` or "B" `[out, rank]` of a shard."""
    infix = "" if adapter == "." else f"{adapter}."
    return f"{stem}.lora_{letter}.{infix}weight"


def adapter_path(name: str) -> str:
    """Return the path of an adapter's tensor in the model, without the prefixes of peft and torch.compile."""
    return name.removeprefix("base_model.model.").replace("_orig_mod.", "")


def _refused(key: str, value: object) -> ConfigError:
    return ConfigError(
        f"adapter_config.json has {key}={str(value)[:60]!r}, which is not supported; merge the adapter into the model"
    )


def _invalid(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"adapter_config.json has {key}={str(value)[:60]!r}; it must be {rule}")
