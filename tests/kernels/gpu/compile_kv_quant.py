"""Launches that write rows to quantised KV caches, at the shapes of decoders."""

from __future__ import annotations

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.kv_quant.triton import write_quantized

HOT = {"_write_quantized_kernel"}


def launches() -> None:
    slots = torch.zeros(64, dtype=torch.int64)
    for codes in kv_quant.CACHE_DTYPES.values():
        for dtype, heads, dim in ((torch.bfloat16, 4, 128), (torch.float16, 20, 64), (torch.float32, 8, 256)):
            cache = torch.empty(2, 4, 16, heads, kv_quant.bytes_per_head(heads, dim), dtype=codes)
            k, v = torch.empty(2, 64, heads, dim, dtype=dtype)
            write_quantized(k, v, cache, slots)
