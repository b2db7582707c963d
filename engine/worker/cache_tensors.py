"""Allocates the KV-cache tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...models.interface import CacheSpec
from ..kv_cache.groups import group_layers, group_of_layer


def allocate_caches(
    specs: Sequence[CacheSpec], num_blocks: Sequence[int], block_size: int, device: torch.device
) -> list[Tensor]:
    """Return a zeroed `[planes, num_blocks, block_size, kv_heads, width]` per layer, or `[num_blocks, width]` for states.

    `num_blocks`: of each cache group. On a CPU, a page takes memory only once it is written.
    """
    counts = [num_blocks[group] for group in group_of_layer(group_layers(specs))]
    shapes = [
        (count, spec.width) if spec.kind == "state" else (spec.planes, count, block_size, spec.kv_heads, spec.width)
        for spec, count in zip(specs, counts, strict=True)
    ]
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=spec.storage_dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)]
    return [_lazy_zeros(shape, spec.storage_dtype) for shape, spec in zip(shapes, specs, strict=True)]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, align: int = 64) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + align, dtype=np.uint8)  # calloc: the kernel maps zero pages on first touch
    start = -raw.ctypes.data % align
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
