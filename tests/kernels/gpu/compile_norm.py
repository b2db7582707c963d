"""Launches of the norms at the shapes of a 7B decoder and its tower."""

from __future__ import annotations

import torch
from sensorium.kernels.gpu import norm

HOT = {"_rms_norm_kernel"}


def launches() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, dim in ((64, 3584), (4096, 1280), (1, 8192)):
            norm.rms_norm(torch.empty(rows, dim, dtype=dtype), torch.empty(dim, dtype=dtype), 1e-6)
