"""The 4-bit float (e2m1) of NVFP4 and MXFP4: two codes per byte, the first in the low bits, and a scale per group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def fp4_weight(codes: Tensor, scale: Tensor, factor: Tensor | None = None) -> GroupedWeight:
    """Return the weight of `codes [out, in / 2]` and `scale [out, groups]`: e4m3, or uint8 exponents of 2 with bias 127.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    inputs, groups = 2 * codes.shape[1], scale.shape[1]
    if codes.dtype != torch.uint8 or len(scale) != len(codes) or not groups or inputs % groups:
        raise ValueError(f"codes {list(codes.shape)} with scales {list(scale.shape)}")
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    table = torch.tensor(_VALUES, device=codes.device)
    return GroupedWeight(codes, scale, inputs // groups, inputs, packed=True, table=table, factor=factor)
