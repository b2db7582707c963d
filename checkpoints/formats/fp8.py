"""FP8 as transformers and DeepSeek write it: e4m3 weights with `weight_scale_inv`, one scale per block or per tensor.

Activations are quantised by the publisher's kernels, per token or with `activation_scale`; here they are not.

Source: arXiv 2412.19437, section 3.3; integrations/finegrained_fp8.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import CheckpointError
from ...kernels.linear.grouped import GroupedWeight
from .base import check_keys, empty, name_patterns, names_match, unsupported

_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8Format:
    """e4m3 weights times a scale per block of outputs and inputs; `block` None: one scale for all.

    Args:
        dtype: of the scale.
        name: last part of the scale's name.
        scale_shape: shape of a single scale.
    """

    block: tuple[int, int] | None
    dtype: torch.dtype
    name: str = _SCALES[0]
    scale_shape: tuple[int, ...] = ()

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        shape = self.scale_shape if self.block is None else (-(-outputs // self.block[0]), -(-inputs // self.block[1]))
        return {"weight": empty(outputs, inputs, dtype=torch.float8_e4m3fn), self.name: empty(*shape, dtype=self.dtype)}

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes, scale = parts["weight"], parts[self.name]
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        if self.block is None:
            return grid_weight(codes, scale.view(1, 1), (len(codes), codes.shape[1]))
        return grid_weight(codes, scale, self.block)


def grid_weight(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> GroupedWeight:
    """Return 8-bit `codes [out, in]` times a scale per block (outputs, inputs). Raise ValueError for other shapes."""
    (outputs, inputs), (rows, columns) = codes.shape, block
    if codes.itemsize != 1 or scale.shape != (-(-outputs // rows), -(-inputs // columns)):
        raise ValueError(f"codes {list(codes.shape)} with scales {list(scale.shape)} for blocks {rows}x{columns}")
    return GroupedWeight(codes, scale, columns, inputs, rows)


@dataclass(frozen=True)
class Fp8Quantization:
    """`block`: outputs and inputs of a block. `wide`: modules that are not quantised."""

    block: tuple[int, int] | None
    wide: Sequence[str]
    parts: Sequence[str] = ("weight", *_SCALES, "activation_scale", "input_scale")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> Fp8Format | None:
        if stored is None:
            return None if names_match(names, self.wide) else Fp8Format(self.block, torch.float32)
        scale = next((name for name in _SCALES if name in stored), None)
        if scale is None:
            return None
        if "weight" not in stored or stored["weight"].dtype != torch.float8_e4m3fn:
            raise unsupported(f"fp8 with a weight of {_dtype(stored)}", names[0], "e4m3 weights")
        block = self.block if stored[scale].ndim == 2 and self.block is not None else None
        return Fp8Format(block, stored[scale].dtype, scale, tuple(stored[scale].shape))


def _dtype(stored: Mapping[str, Tensor]) -> str:
    return str(stored["weight"].dtype).removeprefix("torch.") if "weight" in stored else "no dtype"


def read_fp8(config: Mapping[str, Any]) -> Fp8Quantization:
    """Read the config. Raise CheckpointError for another number format or an invalid block."""
    check_keys(config, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", "static", None)}, "fp8")
    block = config.get("weight_block_size")
    if block is not None:
        sizes = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if not sizes:
            raise CheckpointError(f"quantization_config has weight_block_size={block!r}; it must be two positive integers")
    wide = name_patterns(config, "modules_to_not_convert", "ignored_layers")
    return Fp8Quantization(None if block is None else (block[0], block[1]), wide)
