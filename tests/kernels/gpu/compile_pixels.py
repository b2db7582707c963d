"""Launches for a photo as flat patches, frames of a video, a square image as planes, and uint8 output."""

from __future__ import annotations

import torch
from sensorium.kernels.pixels import triton as pixels
from sensorium.kernels.pixels.layout import Normalization, PatchLayout

HOT = {"_columns_kernel", "_lines_kernel"}
CLIP = Normalization((122.7709, 116.7460, 104.0937), (68.5005, 66.6322, 70.3232))


def launches() -> None:
    for n, size, target, layout in (
        (1, (3000, 4000), (1092, 1456), PatchLayout(14, 2, 2)),
        (8, (720, 1280), (448, 800), PatchLayout(16, 2, 2)),
        (1, (480, 640), (336, 336), PatchLayout()),
    ):
        frames = torch.empty(n, *size, 3, dtype=torch.uint8)
        pixels.preprocess_frames(frames, target, "bicubic", CLIP, layout, torch.bfloat16)
    pixels.preprocess_frames(frames, (896, 1344), "bicubic", Normalization((0.0,) * 3, (1.0,) * 3), PatchLayout(), torch.uint8)
