"""torchao in safetensors files: Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor, with one code per byte.

Source: prototype/safetensors of torchao, versions 0.15 to 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.grouped import GroupedWeight
from .base import empty, name_patterns, names_match, unsupported
from .fp8 import grid_weight

_CODES, _SCALE, _ZERO = (f"_weight_{name}" for name in ("qdata", "scale", "zero_point"))
_REFUSED = ("_weight_scale_and_zero", "_weight_act_pre_scale", "_weight_per_tensor_scale")
_SUPPORTED = "Float8Tensor, Int8Tensor or IntxUnpackedToInt8Tensor"


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
        found = {_CODES: empty(outputs, inputs, dtype=self.codes), _SCALE: empty(*grid, dtype=self.scale)}
        return found | ({} if self.zero is None else {_ZERO: empty(*grid, dtype=self.zero)})

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes = parts[_CODES]
        weight = grid_weight(codes, parts[_SCALE], (self.rows or len(codes), self.columns or codes.shape[1]))
        return weight if self.zero is None else replace(weight, zero=parts[_ZERO])


@dataclass(frozen=True)
class TorchaoQuantization:
    """`default`: the format of modules if no weight files are there. `wide`: modules that are not quantised."""

    default: TorchaoFormat
    wide: Sequence[str]
    parts: Sequence[str] = (_CODES, _SCALE, _ZERO, "_weight_act_quant_scale", "_weight_act_quant_zero_point", *_REFUSED)

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> TorchaoFormat | None:
        if stored is None:
            return None if names_match(names, self.wide) else self.default
        codes, scale = stored.get(_CODES), stored.get(_SCALE)
        refused = next((part for part in _REFUSED if part in stored), None)
        if refused is not None or codes is None or scale is None or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            kind = refused or (_CODES if codes is None else str(codes.dtype).removeprefix("torch."))
            raise unsupported(f"torchao with {kind}", names[0], _SUPPORTED)
        if scale.ndim != 2 or codes.ndim != 2 or 0 in scale.shape:
            raise unsupported(f"torchao with scales {list(scale.shape)}", names[0], _SUPPORTED)
        rows, columns = (None if count == 1 else size // count for size, count in zip(codes.shape, scale.shape, strict=True))
        zero = stored[_ZERO].dtype if _ZERO in stored else None
        return TorchaoFormat(codes.dtype, rows, columns, scale.dtype, zero)


def read_torchao(config: Mapping[str, Any]) -> TorchaoQuantization:
    """Read the config. The weight files alone say how each module is stored."""
    float8 = "float8" in str(config.get("quant_type")).lower()
    default = TorchaoFormat(torch.float8_e4m3fn if float8 else torch.int8, 1, None, torch.float32)
    return TorchaoQuantization(default, name_patterns(config, "modules_to_not_convert"))
