"""Launches that scatter encoder rows with deepstack levels into a chunk of a prompt."""

from __future__ import annotations

import torch
from sensorium.kernels.scatter import triton as scatter

HOT = {"_scatter_kernel"}


def launches() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows, index = torch.empty(1024, 4 * 4096, dtype=dtype), torch.zeros(1024, dtype=torch.int64)
        for level, add in ((0, False), (1, True)):
            part = rows[:, level * 4096 : (level + 1) * 4096]
            scatter.scatter_rows_(torch.empty(4096, 4096, dtype=dtype), index, part, add)
