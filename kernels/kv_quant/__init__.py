"""Quantised KV cache: 8-bit keys and values with one scale per token and head.

A scale depends only on the key or value of one head, so the cached value of a token does not depend on the batch or on how
a prompt is chunked. The dtype of the cache is the format: int8 holds integers, uint8 the bytes of float8_e4m3fn (arXiv
2209.05433).

A token's row in a plane (keys or values) is `kv_heads * dim` quantised values, padding to a multiple of 16 bytes, then
`kv_heads` float32 scales.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
"""Values of `kv_cache_dtype` -> dtype of the cache tensor."""
MAX_VALUES = {torch.int8: 127.0, torch.uint8: 448.0}
_SCALE, _ALIGN = 4, 16  # bytes of a scale, alignment of a row in bytes
_MIN_ABSMAX = 1e-30  # lower bound of a head's absmax


def is_quantized(kv_cache: Tensor) -> bool:
    return kv_cache.dtype in MAX_VALUES


def bytes_per_head(kv_heads: int, dim: int) -> int:
    """Return the bytes of a row divided by its heads: n in a cache `[planes, blocks, block_size, kv_heads, n]`."""
    step = max(_ALIGN // gcd(_ALIGN, kv_heads), _SCALE)  # a multiple of a scale, since rows are also viewed as float32
    return -(-(dim + _SCALE) // step) * step


def split_scales(kv_cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return views of the quantised values `[..., kv_heads, dim]` and of the float32 scales `[..., kv_heads]` of a cache."""
    heads, rows = kv_cache.shape[-2], kv_cache.flatten(-2)
    return rows[..., : heads * dim].unflatten(-1, (heads, dim)), rows[..., -_SCALE * heads :].view(torch.float32)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise `x [..., dim]` and return it with float32 scales `[...]`. NaN or infinity in a row gives such a scale."""
    scale = x.abs().amax(-1).float().clamp_(min=_MIN_ABSMAX).div_(MAX_VALUES[dtype])
    scaled = x.float().div(scale[..., None])
    if dtype == torch.int8:
        return scaled.round_().to(torch.int8), scale
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantize(kv_cache: Tensor, dim: int) -> Tensor:
    """Dequantise a cache, or part of one, to float32 `[..., kv_heads, dim]`."""
    values, scales = split_scales(kv_cache, dim)
    values = values if values.dtype == torch.int8 else values.view(torch.float8_e4m3fn)
    return values.float().mul_(scales[..., None])


def write_quantized(rows: Tensor, plane: Tensor, slots: Tensor) -> None:
    """Quantise `rows [n, kv_heads, dim]` into a plane `[slots, kv_heads, bytes_per_head]` of a cache."""
    for part, values in zip(split_scales(plane, rows.shape[2]), quantize(rows, plane.dtype), strict=True):
        part.index_copy_(0, slots, values)
