"""Launches of the norms at the shapes of decoders and towers."""

from __future__ import annotations

import torch
from sensorium.kernels.norm import triton as norm

HOT = {"_norm_kernel"}


def launches() -> None:
    for dtype, rows, dim in (
        (torch.bfloat16, 64, 3584),
        (torch.bfloat16, 4096, 1280),
        (torch.bfloat16, 1, 8192),
        (torch.bfloat16, 1, 16384),
        (torch.bfloat16, 16, 1024),
        (torch.float16, 64, 3584),
        (torch.float32, 64, 3584),
        (torch.float32, 64, 8192),
    ):
        x, weight = torch.empty(rows, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
        norm.rms_norm(x, weight, 1e-6)
        norm.rms_norm(x, weight, 1e-6, x, 1.0)
        norm.layer_norm(x, weight, weight, 1e-6, x)
    for heads in (32, 1):
        norm.norm_heads_(
            torch.empty(64, 48, 128, dtype=torch.bfloat16)[:, :heads], torch.empty(128, dtype=torch.bfloat16), 1e-6
        )
