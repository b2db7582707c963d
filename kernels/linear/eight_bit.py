"""Weights of 8 bits with one scale per output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

INT8_MAX = 127
FP8_MAX = 448.0  # largest value of float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """`weight` int8 `[out, in]` and `scale` float32 `[out]`; `weight * scale[:, None]` approximates the original."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """`weight` float8_e4m3fn `[out, in]` and `scale` float32 `[out]`; `weight * scale[:, None]` approximates the original."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
