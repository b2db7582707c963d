"""Image preprocessing: uint8 frames are resized, normalised and laid out as planes or as patches.

Resizing gives the bits of torch's antialiased filter for uint8: float64 weights rounded to 16 bits, columns first, sums
rounded to uint8 after each axis (Pillow's algorithm). Sources: aten/src/ATen/native/cpu/UpSampleKernel.cpp; the cubic is
Keys' with a = -1/2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend

_BITS = 15  # bits of a weight, without its sign
_MAX_BITS = 22  # most fraction bits of a weight
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class PatchLayout:
    """The layout of the output: planes `[n, 3, h, w]` if `patch` is 0, else patches.

    Patches are rows `[patches, 3 * temporal * patch * patch]`. The patches of a merge x merge square are adjacent, and squares
    follow line by line. Within a row the order is channel, frame, line, column. `temporal` frames make one patch; the last
    frame is repeated to fill the last group.
    """

    patch: int = 0
    merge: int = 1
    temporal: int = 1


@dataclass(frozen=True)
class Normalization:
    """Per-channel normalisation `(pixel - mean) / std` in float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


_IDENTITY = Normalization((0.0,) * 3, (1.0,) * 3)


def preprocess_frames(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Resize uint8 `[n, h, w, 3]` (any strides) to `target` (height, width), normalise it, and lay it out in `dtype`.

    `filter` is "bilinear", "bicubic" or "lanczos". Target sides are multiples of `patch * merge`.
    """
    if backend("pixels", frames.device, dtype) == "triton":
        from .gpu import pixels

        return pixels.preprocess_frames(frames, target, filter, normalization, layout, dtype)
    return preprocess_frames_reference(frames, target, filter, normalization, layout, dtype)


def preprocess_frames_reference(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Compute `preprocess_frames` in torch."""
    small = resize_reference(frames, target, filter)
    mean, std = (torch.tensor(one, device=frames.device).view(1, 3, 1, 1) for one in (normalization.mean, normalization.std))
    scaled = small.float().sub_(mean).div_(std).to(dtype)
    if not layout.patch:
        return scaled
    p, m, steps = layout.patch, layout.merge, -(-len(frames) // layout.temporal)
    which = torch.arange(steps * layout.temporal, device=frames.device).clamp(max=len(frames) - 1)
    blocks = scaled[which].view(steps, layout.temporal, 3, target[0] // (m * p), m, p, target[1] // (m * p), m, p)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * layout.temporal * p * p)


def resize(frames: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Resize uint8 `[n, h, w, 3]` (any strides) to uint8 `[n, 3, height, width]`. Every device gives the same bits."""
    if tuple(frames.shape[1:3]) != target and backend("pixels", frames.device, torch.float32) == "triton":
        from .gpu import pixels

        return pixels.preprocess_frames(frames, target, filter, _IDENTITY, PatchLayout(), torch.uint8)
    return resize_reference(frames, target, filter)


def resize_reference(frames: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Compute `resize` in torch, on a CPU with torch's own resize."""
    planes = frames.permute(0, 3, 1, 2)
    if tuple(planes.shape[2:]) == target:
        return planes
    if frames.device.type == "cpu":
        return F.interpolate(planes, target, mode=filter, antialias=True)
    columns = _resize_last_axis(planes, filter, target[1])
    return _resize_last_axis(columns.transpose(2, 3), filter, target[0]).transpose(2, 3)


def _resize_last_axis(pixels: Tensor, filter: str, target: int) -> Tensor:
    """Resize uint8 `[..., size]` to uint8 `[..., target]`."""
    table, shift = resize_weights(pixels.shape[-1], target, filter)
    starts, taps = table[0].to(pixels.device), table[1:].to(pixels.device)
    total = torch.full((*pixels.shape[:-1], target), 1 << shift - 1, dtype=torch.int32, device=pixels.device)
    for tap, weight in enumerate(taps):
        total += pixels[..., (starts + tap).clamp(max=pixels.shape[-1] - 1)] * weight
    return (total >> shift).clamp_(0, 255).to(torch.uint8)


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
