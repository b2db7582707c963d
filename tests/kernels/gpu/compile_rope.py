"""Launches of rotary embedding at the shapes of decoders and towers."""

from __future__ import annotations

import torch
from sensorium.kernels.rope import triton as rope

HOT = {"_rotate_kernel"}
SHAPES = (
    (torch.bfloat16, 64, False),
    (torch.bfloat16, 80, False),
    (torch.bfloat16, 128, False),
    (torch.bfloat16, 128, True),
    (torch.bfloat16, 256, False),
    (torch.float16, 128, False),
    (torch.float32, 128, False),
)


def launches() -> None:
    for dtype, dim, interleaved in SHAPES:
        cos, sin = torch.empty(2, 64, dim // 2)
        rope.rotate_(torch.empty(64, 48, dim, dtype=dtype)[:, :32], cos, sin, interleaved)
