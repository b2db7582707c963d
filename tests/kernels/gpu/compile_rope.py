"""Launches of rotary embedding at the shapes of decoders and towers."""

from __future__ import annotations

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.gpu import rope
from torch import Tensor

HOT = {"_rotate_kernel", "_prepare_qkv_kernel"}


def turn_of(dim: int) -> tuple[Tensor, Tensor]:
    return torch.empty(64, dim // 2), torch.empty(64, dim // 2)


def launches() -> None:
    for dtype, dim, interleaved in (
        (torch.bfloat16, 64, False),
        (torch.bfloat16, 80, False),
        (torch.bfloat16, 128, False),
        (torch.bfloat16, 128, True),
        (torch.bfloat16, 256, False),
        (torch.float16, 128, False),
        (torch.float32, 128, False),
    ):
        cos_sin = turn_of(dim)
        qkv, weight = torch.empty(64, 48, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
        rope.rotate_(qkv[:, :32], *cos_sin, interleaved)
        cache, slots = torch.empty(2, 4, 16, 8, dim, dtype=dtype), torch.zeros(64, dtype=torch.int64)
        for norms in ((weight, weight, 1e-6, 0.0), (weight, weight, 1e-6, 1.0), None):
            rope.prepare_qkv_(qkv, cache, slots, cos_sin, interleaved, norms)
    rope.prepare_qkv_(qkv, cache, slots, None, False, None)
    qkv, cos_sin, weight = torch.empty(64, 36, 128, dtype=torch.bfloat16), turn_of(128), torch.empty(128, dtype=torch.bfloat16)
    for codes in kv_quant.CACHE_DTYPES.values():
        rope.prepare_qkv_(
            qkv,
            torch.empty(2, 4, 16, 4, kv_quant.bytes_per_head(4, 128), dtype=codes),
            slots,
            cos_sin,
            False,
            (weight, weight, 1e-6, 0.0),
        )
