"""GGUF: weights in the block formats of GGML. The name of a stored tensor ends in its format instead of in "weight"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.blocks import BLOCKS, BlockWeight
from .base import empty


@dataclass(frozen=True)
class GgufFormat:
    """`kind`: a key of `kernels.linear.blocks.BLOCKS`."""

    kind: str

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        numbers, size = BLOCKS[self.kind]
        return {self.kind: empty(outputs, inputs // numbers * size, dtype=torch.uint8)}

    def decode(self, parts: Mapping[str, Tensor]) -> BlockWeight:
        return BlockWeight(parts[self.kind], self.kind)


@dataclass(frozen=True)
class GgufQuantization:
    parts: Sequence[str] = tuple(BLOCKS)

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> GgufFormat | None:
        return None if stored is None else GgufFormat(next(iter(stored)))


def read_gguf_config(config: Mapping[str, Any]) -> GgufQuantization:
    """Return the quantization of a GGUF file, whose tensors state their formats."""
    return GgufQuantization()
