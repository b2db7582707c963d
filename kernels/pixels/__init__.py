"""Image preprocessing: uint8 frames are resized, normalised and laid out as planes or as patches.

Resizing gives the bits of torch's antialiased filter for uint8: float64 weights rounded to 16 bits, columns first, sums
rounded to uint8 after each axis (Pillow's algorithm). Sources: aten/src/ATen/native/cpu/UpSampleKernel.cpp; the cubic is
Keys' with a = -1/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import implementation
from .layout import Normalization, PatchLayout


def preprocess_frames(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Resize uint8 `[n, h, w, 3]` (any strides) to `target` (height, width), normalise it, and lay it out in `dtype`.

    `filter` is "bilinear", "bicubic" or "lanczos". Target sides are multiples of `patch * merge`.
    """
    prepared: Tensor = implementation("pixels", frames.device, dtype).preprocess_frames(
        frames, target, filter, normalization, layout, dtype
    )
    return prepared


def resize(frames: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Resize uint8 `[n, h, w, 3]` (any strides) to uint8 `[n, 3, height, width]`. Every device gives the same bits."""
    resized: Tensor = implementation("pixels", frames.device, torch.float32).resize(frames, target, filter)
    return resized
