"""Launches of the step between the QKV projection and attention at the shapes of decoders."""

from __future__ import annotations

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.qkv_prepare.triton import prepare_qkv_
from torch import Tensor

HOT = {"_prepare_qkv_kernel"}
SHAPES = (
    (torch.bfloat16, 64, False),
    (torch.bfloat16, 80, False),
    (torch.bfloat16, 128, False),
    (torch.bfloat16, 128, True),
    (torch.bfloat16, 256, False),
    (torch.float16, 128, False),
    (torch.float32, 128, False),
)


def cos_sin_of(dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty(64, dim // 2), torch.empty(64, dim // 2)


def launches() -> None:
    slots = torch.zeros(64, dtype=torch.int64)
    for dtype, dim, interleaved in SHAPES:
        qkv, weight = torch.empty(64, 48, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
        cache = torch.empty(2, 4, 16, 8, dim, dtype=dtype)
        for norms in ((weight, weight, 1e-6, 0.0), (weight, weight, 1e-6, 1.0), None):
            prepare_qkv_(qkv, cache, slots, cos_sin_of(dim), interleaved, norms)
    prepare_qkv_(qkv, cache, slots, None, False, None)
    qkv, weight = torch.empty(64, 36, 128, dtype=torch.bfloat16), torch.empty(128, dtype=torch.bfloat16)
    for codes in kv_quant.CACHE_DTYPES.values():
        cache = torch.empty(2, 4, 16, 4, kv_quant.bytes_per_head(4, 128), dtype=codes)
        prepare_qkv_(qkv, cache, slots, cos_sin_of(128), False, (weight, weight, 1e-6, 0.0))
