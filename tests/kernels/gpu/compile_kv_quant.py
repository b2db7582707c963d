"""Launches that put rows into caches of 8 bits, at the shapes of decoders."""

from __future__ import annotations

import torch
from sensorium.kernels import kv8
from sensorium.kernels.gpu.kv8 import write_codes

HOT = {"_write_codes_kernel"}


def launches() -> None:
    slots = torch.zeros(64, dtype=torch.int64)
    for codes in kv8.CODES.values():
        for dtype, heads, dim in ((torch.bfloat16, 4, 128), (torch.float16, 20, 64), (torch.float32, 8, 256)):
            cache = torch.empty(2, 4, 16, heads, kv8.width(heads, dim), dtype=codes)
            k, v = torch.empty(2, 64, heads, dim, dtype=dtype)
            write_codes(k, v, cache, slots)
