"""torchao in safetensors files: Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor, and Int4Tensor with two codes per byte.

Source: prototype/safetensors and Int4Tensor of torchao, versions 0.15 to 0.18; the packing of FBGEMM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import empty, name_patterns, names_match, unsupported
from .fp8 import grid_weight

_CODES, _SCALE, _ZERO = (f"_weight_{name}" for name in ("qdata", "scale", "zero_point"))
_REFUSED = ("_weight_scale_and_zero", "_weight_act_pre_scale", "_weight_per_tensor_scale")
_SUPPORTED = "Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor or Int4Tensor"
_SIGNS = 0x88  # highest bits of two codes


@dataclass(frozen=True)
class TorchaoFormat:
    """Codes times a scale per block.

    Args:
        codes: dtype of the codes. scale, zero: dtypes of scales and zero points; no zero points if None.
        rows, columns: outputs and inputs of a block; None: all.
    """

    codes: torch.dtype
    rows: int | None
    columns: int | None
    scale: torch.dtype
    zero: torch.dtype | None = None

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        grid = -(-outputs // (self.rows or outputs)), -(-inputs // (self.columns or inputs))
        tensors = {_CODES: empty(outputs, inputs, dtype=self.codes), _SCALE: empty(*grid, dtype=self.scale)}
        return tensors | ({} if self.zero is None else {_ZERO: empty(*grid, dtype=self.zero)})

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes = parts[_CODES]
        weight = grid_weight(codes, parts[_SCALE], (self.rows or len(codes), self.columns or codes.shape[1]))
        return weight if self.zero is None else replace(weight, zero=parts[_ZERO])


@dataclass(frozen=True)
class Int4Format:
    """Signed codes of 4 bits, the first of two in the low bits; the zero point of a group is added to its scaled codes.

    `group`: inputs of a group. `dtype`: of scales and zero points.
    """

    group: int
    dtype: torch.dtype = torch.bfloat16

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        grid = -(-inputs // self.group), outputs
        tensors = {name: empty(*grid, dtype=self.dtype) for name in (_SCALE, _ZERO)}
        return {_CODES: empty(outputs, inputs // 2, dtype=torch.int8), **tensors}

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes, scale, zero = parts[_CODES].view(torch.uint8) ^ _SIGNS, parts[_SCALE], parts[_ZERO]
        inputs = 2 * codes.shape[1]
        if scale.shape != zero.shape or scale.shape != (-(-inputs // self.group), len(codes)):
            raise ValueError(f"codes {[len(codes), inputs]} with scales {list(scale.shape)} for groups of {self.group}")
        grids = (grid.t().contiguous() for grid in (scale, zero))
        return GroupedWeight(codes, next(grids), self.group, inputs, packed=True, offset=8, shift=next(grids))


@dataclass(frozen=True)
class TorchaoQuantization:
    """`default`: the format of modules if no weight files are there. `wide`: modules that are not quantised."""

    default: TorchaoFormat | Int4Format
    wide: Sequence[str]
    parts: Sequence[str] = (_CODES, _SCALE, _ZERO, "_weight_act_quant_scale", "_weight_act_quant_zero_point", *_REFUSED)

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> TorchaoFormat | Int4Format | None:
        if stored is None:
            return None if names_match(names, self.wide) else self.default
        codes, scale = stored.get(_CODES), stored.get(_SCALE)
        refused = next((part for part in _REFUSED if part in stored), None)
        if refused is not None or codes is None or scale is None or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            kind = refused or (_CODES if codes is None else str(codes.dtype).removeprefix("torch."))
            raise unsupported(f"torchao with {kind}", names[0], _SUPPORTED)
        if scale.ndim != 2 or codes.ndim != 2 or 0 in scale.shape:
            raise unsupported(f"torchao with scales {list(scale.shape)}", names[0], _SUPPORTED)
        if _ZERO in stored and stored[_ZERO].is_floating_point():
            return Int4Format(2 * codes.shape[1] // scale.shape[0], scale.dtype)
        rows, columns = (None if count == 1 else size // count for size, count in zip(codes.shape, scale.shape, strict=True))
        zero = stored[_ZERO].dtype if _ZERO in stored else None
        return TorchaoFormat(codes.dtype, rows, columns, scale.dtype, zero)


def read_torchao(config: Mapping[str, Any]) -> TorchaoQuantization:
    """Read the config. The weight files alone say how each module is stored."""
    kind = str(config.get("quant_type")).lower()
    default: TorchaoFormat | Int4Format = TorchaoFormat(torch.int8, 1, None, torch.float32)
    if "float8" in kind:
        default = TorchaoFormat(torch.float8_e4m3fn, 1, None, torch.float32)
    elif "int4" in kind:
        group = re.search(r"group_size\D+(\d+)", kind)
        default = Int4Format(int(group[1]) if group else 128)
    return TorchaoQuantization(default, name_patterns(config, "modules_to_not_convert"))
