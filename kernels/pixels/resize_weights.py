"""Weights of torch's antialiased filters for uint8: float64, rounded to 16 bits.

Sources: aten/src/ATen/native/cpu/UpSampleKernel.cpp; the cubic is Keys' with a = -1/2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 15  # bits of a weight, without its sign
_MAX_BITS = 22  # most fraction bits of a weight
Numbers = NDArray[np.float64]


@functools.lru_cache(maxsize=256)
def resize_weights(size: int, target: int, filter: str) -> tuple[Tensor, int]:
    """Return the weights that resize `size` values to `target`, int32 `[1 + taps, target]`, and their number of fraction bits.

    Row 0 is the position of the first tap, the other rows are weights. A tap beyond the edge has weight 0.
    """
    if size == target:  # every filter is 1 at its centre and 0 at other integers
        return torch.stack((torch.arange(target), torch.full((target,), 1 << _BITS - 1))).int(), _BITS - 1
    half, curve = _FILTERS[filter]
    scale = size / target
    stretch = max(scale, 1.0)
    support = half * stretch
    taps = math.ceil(support) * 2 + 1
    centre = scale * (np.arange(target) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.clip(np.minimum((centre + support + 0.5).astype(np.int64), size) - first, 0, taps)
    tap = np.arange(taps)[:, None]
    values = np.where(tap < count, curve((tap + first - centre + 0.5) * (1.0 / stretch)), 0.0)
    values = values / values.cumsum(0)[-1]  # sequential sum, as in torch
    largest = values.max()
    shift = next((bits for bits in range(_MAX_BITS) if int(0.5 + largest * (1 << bits + 1)) >= 1 << _BITS), _MAX_BITS)
    whole = np.trunc(values * (1 << shift) + np.where(values < 0, -0.5, 0.5)).astype(np.int32)
    return torch.from_numpy(np.concatenate((first[None].astype(np.int32), whole[: count.max()]))), shift


def _bilinear(x: Numbers) -> Numbers:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: Numbers) -> Numbers:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x < 1, near, np.where(x < 2, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a, 0.0))


def _lanczos(x: Numbers) -> Numbers:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0.0)


_FILTERS: dict[str, tuple[float, Callable[[Numbers], Numbers]]] = {  # support on each side, and the curve
    "bilinear": (1.0, _bilinear),
    "bicubic": (2.0, _bicubic),
    "lanczos": (3.0, _lanczos),
}
