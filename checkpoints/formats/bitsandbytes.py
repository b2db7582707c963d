"""bitsandbytes: NF4 and FP4 with a table of 16 values and a scale per block of the flat weight; int8 with one per output.

Its runtime quantises activations of int8 layers but for outliers; here they are not quantised.

Source: arXiv 2305.14314 (NF4, nested scales), arXiv 2208.07339 (int8); the serialisation of bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import CheckpointError
from ...kernels.linear.grouped import GroupedWeight
from .base import empty, name_patterns, names_match, unsupported
from .fp8 import grid_weight

_KINDS = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_BLOCK, _NESTED_BLOCK = 64, 256
_INT8_MAX = 127


@dataclass(frozen=True)
class FourBitFormat:
    """Codes of the flat weight, two per byte, the first in the high bits.

    Args:
        kind: "nf4" or "fp4".
        nested: the scales are 8-bit codes themselves, with scales of their own.
        storage: dtype under which the bytes of the codes are stored.
    """

    kind: str
    nested: bool
    storage: torch.dtype = torch.uint8

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        blocks, words = -(-outputs * inputs // _BLOCK), outputs * inputs // 2 // self.storage.itemsize
        state = {"shape": [outputs, inputs], "blocksize": _BLOCK}
        tensors = {
            "weight": empty(words, 1, dtype=self.storage),
            "weight.absmax": empty(blocks, dtype=torch.uint8 if self.nested else torch.float32),
            "weight.quant_map": empty(16, dtype=torch.float32),
        }
        if self.nested:
            tensors["weight.nested_absmax"] = empty(-(-blocks // _NESTED_BLOCK), dtype=torch.float32)
            tensors["weight.nested_quant_map"] = empty(256, dtype=torch.float32)
            state |= {"nested_blocksize": _NESTED_BLOCK, "nested_offset": 0.0}
        return {**tensors, _STATE + self.kind: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        state = json.loads(bytes(parts[_STATE + self.kind].tolist()))
        (outputs, inputs), block, absmax = state["shape"], int(state["blocksize"]), parts["weight.absmax"]
        if inputs % 2:
            raise ValueError(f"{inputs} inputs; an odd number is not supported")
        if self.nested:
            scales = parts["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
            codes = parts["weight.nested_quant_map"].float().index_select(0, absmax.flatten().int())
            absmax = codes * scales + float(state["nested_offset"])
        group = gcd(inputs, block)  # a block may end within an output
        scale = absmax.float().flatten().repeat_interleave(block // group)[: outputs * inputs // group]
        data = parts["weight"].contiguous().view(torch.uint8).view(outputs, inputs // 2)
        swapped = data << 4 | data >> 4
        table = parts["weight.quant_map"].float()
        return GroupedWeight(swapped, scale.view(outputs, -1), group, inputs, packed=True, table=table)


@dataclass(frozen=True)
class Int8Format:
    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {"weight": empty(outputs, inputs, dtype=torch.int8), "SCB": empty(outputs, dtype=torch.float32)}

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        order = parts.get("weight_format")
        if order is not None and order.any():
            raise ValueError("weight_format is not that of rows")
        codes = parts["weight"]
        return grid_weight(codes, parts["SCB"].float()[:, None] / _INT8_MAX, (1, codes.shape[1]))


@dataclass(frozen=True)
class BitsAndBytes:
    """`default`: the format of modules if no weight files are there. `wide`: modules that are not quantised."""

    default: FourBitFormat | Int8Format
    wide: Sequence[str]
    parts: Sequence[str] = (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        *(_STATE + kind for kind in _KINDS), "SCB", "weight_format",
    )  # fmt: skip

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> FourBitFormat | Int8Format | None:
        if stored is None:
            return None if names_match(names, self.wide) else self.default
        if "SCB" in stored:
            return Int8Format()
        kind = next((kind for kind in _KINDS if _STATE + kind in stored), None)
        if kind is not None and "weight" in stored:
            return FourBitFormat(kind, "weight.nested_absmax" in stored, stored["weight"].dtype)
        if "weight.absmax" in stored:
            raise unsupported("bitsandbytes without a quant_state", names[0], "nf4 or fp4 weights")
        return None


def read_bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytes:
    """Read the config. Raise CheckpointError for another type of 4-bit numbers."""
    kind = str(config.get("bnb_4bit_quant_type") or "fp4")
    four = bool(config.get("load_in_4bit") or config.get("_load_in_4bit"))
    if four and kind not in _KINDS:
        raise CheckpointError(f"quantization_config has bnb_4bit_quant_type={kind[:60]!r}; supported are {', '.join(_KINDS)}")
    nested = bool(config.get("bnb_4bit_use_double_quant"))
    default = FourBitFormat(kind, nested) if four else Int8Format()
    return BitsAndBytes(default, name_patterns(config, "llm_int8_skip_modules"))
