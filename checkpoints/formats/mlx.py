"""MLX's affine quantisation: codes of 4 or 8 bits in uint32 words, with a scale and a bias per group of inputs.

Source: mlx.core.quantize in MLX's documentation; the config that mlx-lm and mlx-vlm write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import check_keys, empty, group_size, in_decoder, scale_dtype, unsupported

_BITS = (4, 8)


@dataclass(frozen=True)
class MlxFormat:
    """`group`: inputs that share a scale and a bias. `dtype`: of both."""

    bits: int
    group: int
    dtype: torch.dtype = torch.bfloat16

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        grid = outputs, inputs // self.group
        return {
            "weight": empty(outputs, inputs * self.bits // 32, dtype=torch.uint32),
            "scales": empty(*grid, dtype=self.dtype),
            "biases": empty(*grid, dtype=self.dtype),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes, scales, biases = parts["weight"].contiguous().view(torch.uint8), parts["scales"], parts["biases"]
        inputs = codes.shape[1] * 8 // self.bits
        if scales.shape != biases.shape or scales.shape != (len(codes), inputs // self.group):
            raise ValueError(f"codes {[len(codes), inputs]} with scales {list(scales.shape)} for groups of {self.group}")
        return GroupedWeight(codes, scales, self.group, inputs, packed=self.bits == 4, shift=biases)


@dataclass(frozen=True)
class MlxQuantization:
    """`form`: the default format. `modules`: module -> settings that replace the default, or False if not quantised."""

    form: MlxFormat
    modules: Mapping[str, Any]
    parts: Sequence[str] = ("weight", "scales", "biases")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> MlxFormat | None:
        entry = next((self.modules[name] for name in names if name in self.modules), True)
        if stored is None:
            if entry is False or not in_decoder(names):
                return None
        elif "scales" not in stored:
            return None
        weight_format = replace(self.form, dtype=scale_dtype(stored, "scales", self.form.dtype))
        if isinstance(entry, Mapping):
            group = group_size(entry.get("group_size", weight_format.group)) or weight_format.group
            weight_format = replace(weight_format, bits=entry.get("bits", weight_format.bits), group=group)
            if weight_format.bits not in _BITS or entry.get("mode", "affine") != "affine":
                raise unsupported(
                    f"{entry.get('mode', 'affine')} with {weight_format.bits} bits", names[0], "affine codes of 4 or 8 bits"
                )
        return weight_format


def read_mlx(config: Mapping[str, Any]) -> MlxQuantization:
    """Read `quantization` of config.json. Raise CheckpointError for another mode or number of bits."""
    check_keys(config, {"mode": ("affine", None), "bits": _BITS}, "mlx")
    modules = {name: value for name, value in config.items() if isinstance(value, Mapping | bool)}
    return MlxQuantization(MlxFormat(config["bits"], group_size(config["group_size"]) or 64), modules)
