"""NVIDIA's Model Optimizer: NVFP4 with a scale per 16 inputs and one for all, and FP8 with one scale.

Its runtime also quantises activations (`input_scale`); here they are not quantised.

Source: the unified checkpoints that Model Optimizer exports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import check_keys, check_pattern, empty, name_patterns, names_match, unsupported
from .fp4 import fp4_weight
from .fp8 import Fp8Format

_GROUP = 16


@dataclass(frozen=True)
class Nvfp4Format:
    """`factor_shape`: stored shape of the scale for all."""

    factor_shape: tuple[int, ...] = ()

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {
            "weight": empty(outputs, inputs // 2, dtype=torch.uint8),
            "weight_scale": empty(outputs, inputs // _GROUP, dtype=torch.float8_e4m3fn),
            "weight_scale_2": empty(*self.factor_shape, dtype=torch.float32),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        return fp4_weight(parts["weight"], parts["weight_scale"], parts["weight_scale_2"].float())


@dataclass(frozen=True)
class ModelOpt:
    """`default`: the format of modules if no weight files are there. `wide`: modules that are not quantised."""

    default: Nvfp4Format | Fp8Format
    wide: Sequence[str]
    parts: Sequence[str] = ("weight", "weight_scale", "weight_scale_2", "input_scale")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> Nvfp4Format | Fp8Format | None:
        if stored is None:
            return None if names_match(names, self.wide) else self.default
        if "weight_scale" not in stored or "weight" not in stored:
            return None
        if "weight_scale_2" in stored and stored["weight"].dtype == torch.uint8:
            return Nvfp4Format(tuple(stored["weight_scale_2"].shape))
        scale = stored["weight_scale"]
        if stored["weight"].dtype != torch.float8_e4m3fn or scale.numel() != 1:
            kind = str(stored["weight"].dtype).removeprefix("torch.")
            raise unsupported(f"modelopt with {kind} and scales {list(scale.shape)}", names[0], "NVFP4 or FP8 with one scale")
        return Fp8Format(None, scale.dtype, "weight_scale", tuple(scale.shape))


def read_modelopt(config: Mapping[str, Any]) -> ModelOpt:
    """Read the config. Raise CheckpointError for another algorithm."""
    check_keys(config, {"quant_algo": ("NVFP4", "FP8", "MIXED_PRECISION", None)}, "modelopt")
    fp8 = config.get("quant_algo") == "FP8"
    default = Fp8Format(None, torch.float32, "weight_scale") if fp8 else Nvfp4Format()
    patterns = [_pattern(name) for name in name_patterns(config, "ignore", "exclude_modules")]
    return ModelOpt(default, patterns)


def _pattern(name: str) -> str:
    """Return a shell pattern such as `model.visual*` as a "re:" pattern."""
    if "*" not in name:
        return name
    pattern = ".*".join(map(re.escape, name.split("*"))) + "$"
    check_pattern("ignore or exclude_modules", pattern)
    return f"re:{pattern}"
