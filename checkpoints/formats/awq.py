"""AWQ in the layout of its GEMM kernels: codes of 4 bits, eight outputs in an int32 word, in an interleaved order.

Source: arXiv 2306.00978; the packing of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import check_keys, empty, group_size, in_decoder, name_patterns, names_match, scale_dtype
from .integers import integer_weight, unpack

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output at each place of a word
_BITS, _EACH = 4, 8


@dataclass(frozen=True)
class AwqFormat:
    """`group`: inputs that share a scale, None: all. `dtype`: of the scales."""

    group: int | None
    dtype: torch.dtype

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups, words = -(-inputs // (self.group or inputs)), outputs // _EACH
        return {
            "qweight": empty(inputs, words, dtype=torch.int32),
            "qzeros": empty(groups, words, dtype=torch.int32),
            "scales": empty(groups, outputs, dtype=self.dtype),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        codes, zero = (unpack(parts[name], _BITS, _ORDER) for name in ("qweight", "qzeros"))
        return integer_weight(codes, parts["scales"], zero, _BITS, self.group or len(codes))


@dataclass(frozen=True)
class AwqQuantization:
    group: int | None
    wide: Sequence[str]
    parts: Sequence[str] = ("qweight", "qzeros", "scales")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> AwqFormat | None:
        quantized = in_decoder(names) and not names_match(names, self.wide) if stored is None else "qweight" in stored
        return AwqFormat(self.group, scale_dtype(stored, "scales", torch.float16)) if quantized else None


def read_awq(config: Mapping[str, Any]) -> AwqQuantization:
    """Read the config. Raise CheckpointError for another layout or number of bits."""
    settings = {"version": str(config.get("version", "gemm")).lower(), "bits": config.get("bits", config.get("w_bit", _BITS))}
    settings["zero_point"] = config.get("zero_point", True)
    check_keys(settings, {"version": ("gemm",), "bits": (_BITS,), "zero_point": (True,)}, "awq")
    group = group_size(config.get("group_size", config.get("q_group_size", 128)))
    return AwqQuantization(group, name_patterns(config, "modules_to_not_convert"))
