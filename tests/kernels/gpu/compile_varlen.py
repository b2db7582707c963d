"""Launches of packed attention at the head sizes of published towers: images at native size, windows, and odd heads."""

from __future__ import annotations

import torch
from sensorium.kernels.varlen import triton as varlen

HOT = {"_varlen_kernel"}
DIMS = (64, 72, 80, 88, 96, 128, 192, 256)


def launches() -> None:
    for dim in DIMS:
        q, k, v = torch.empty(4096, 3, 16, dim, dtype=torch.bfloat16).unbind(1)
        for lengths in ([4096], [64] * 64) if dim <= 128 else ([4096],):
            varlen.varlen_attention(q, k, v, lengths, dim**-0.5)
    varlen.varlen_attention(*torch.empty(4096, 3, 16, 80, dtype=torch.float16).unbind(1), [4096], 0.1)
