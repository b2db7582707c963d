"""MXFP4 as gpt-oss stores its experts: blocks of 32 codes with a power of 2 each, gate and up in alternating outputs.

Source: the OCP Microscaling specification; integrations/mxfp4.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import empty, name_patterns, names_match
from .fp4 import fp4_weight

_BLOCK = 32


@dataclass(frozen=True)
class Mxfp4Format:
    """`interleaved`: outputs of gate and up alternate where both are one matrix."""

    interleaved: ClassVar[bool] = True

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        blocks = inputs // _BLOCK
        return {
            "blocks": empty(outputs, blocks, _BLOCK // 2, dtype=torch.uint8),
            "scales": empty(outputs, blocks, dtype=torch.uint8),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        return fp4_weight(parts["blocks"].flatten(1), parts["scales"])


@dataclass(frozen=True)
class Mxfp4:
    """`wide`: modules that are not quantised. Nothing but experts is."""

    wide: Sequence[str]
    parts: Sequence[str] = ("blocks", "scales")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> Mxfp4Format | None:
        if stored is None:
            return Mxfp4Format() if any(".experts." in name for name in names) and not names_match(names, self.wide) else None
        return Mxfp4Format() if "blocks" in stored else None


def read_mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    return Mxfp4(name_patterns(config, "modules_to_not_convert"))
