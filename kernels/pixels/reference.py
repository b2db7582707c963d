"""Image preprocessing in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import Normalization, PatchLayout
from .resize_weights import resize_weights


def preprocess_frames(
    frames: Tensor, target: tuple[int, int], filter: str, normalization: Normalization, layout: PatchLayout, dtype: torch.dtype
) -> Tensor:
    """Compute `pixels.preprocess_frames`."""
    small = resize(frames, target, filter)
    mean, std = (
        torch.tensor(values, device=frames.device).view(1, 3, 1, 1) for values in (normalization.mean, normalization.std)
    )
    scaled = small.float().sub_(mean).div_(std).to(dtype)
    if not layout.patch:
        return scaled
    p, m, steps = layout.patch, layout.merge, -(-len(frames) // layout.temporal)
    which = torch.arange(steps * layout.temporal, device=frames.device).clamp(max=len(frames) - 1)
    blocks = scaled[which].view(steps, layout.temporal, 3, target[0] // (m * p), m, p, target[1] // (m * p), m, p)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * layout.temporal * p * p)


def resize(frames: Tensor, target: tuple[int, int], filter: str) -> Tensor:
    """Compute `pixels.resize`, on a CPU with torch's own resize."""
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
