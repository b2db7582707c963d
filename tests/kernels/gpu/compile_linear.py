"""Launches of 8-bit products at the shapes of a 7B decoder."""

from __future__ import annotations

import torch
from sensorium.kernels.gpu import linear

HOT = {"_quantize_kernel"}


def launches() -> None:
    for rows, dim in ((1, 3584), (64, 18944), (4096, 3584)):
        linear.quantize_rows(torch.empty(rows, dim, dtype=torch.bfloat16))
