"""Rows of a key/value cache in 8 bits: a code for each number, a scale for each head. Knows no model, and no sequence.

A head's numbers share the scale that makes the largest of them the largest code, so what a row becomes depends on that row
alone: not on its company, nor on where a prompt was cut. Two kinds of codes, told apart by the dtype of the cache: int8 are
integers, uint8 the bytes of float8_e4m3fn (arXiv 2209.05433).

A token's row of a plane is `kv_heads * dim` codes, then what fills it up to whole 16 bytes, then `kv_heads` scales in float32.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "fp8": torch.uint8}
"""Names of kinds and the dtypes of caches that hold them."""
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
_SCALE, _ALIGN = 4, 16  # bytes of a scale, and what the length of a row is a multiple of
_TINY = 1e-30  # a head's largest magnitude is taken for no less


def is_coded(kv_cache: Tensor) -> bool:
    return kv_cache.dtype in LARGEST


def width(kv_heads: int, dim: int) -> int:
    """Bytes of a row by head: the last size of a cache `[planes, blocks, block_size, kv_heads, width]`."""
    step = max(_ALIGN // gcd(_ALIGN, kv_heads), _SCALE)  # whole scales too, as which all of a cache is looked at
    return -(-(dim + _SCALE) // step) * step


def views(kv_cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of a cache `[..., kv_heads, width]` its codes `[..., kv_heads, dim]` and scales, float32 `[..., kv_heads]`."""
    heads, rows = kv_cache.shape[-2], kv_cache.flatten(-2)
    return rows[..., : heads * dim].unflatten(-1, (heads, dim)), rows[..., -_SCALE * heads :].view(torch.float32)


def encode(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x [..., dim]` as codes of that dtype and scales, float32 `[...]`; a row that is not finite gets a scale that is not."""
    scale = x.abs().amax(-1).float().clamp_(min=_TINY).div_(LARGEST[codes])
    scaled = x.float().div(scale[..., None])
    if codes == torch.int8:
        return scaled.round_().to(torch.int8), scale
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def decode(kv_cache: Tensor, dim: int) -> Tensor:
    """What a cache, or part of one, stands for: float32 `[..., kv_heads, dim]`."""
    codes, scales = views(kv_cache, dim)
    numbers = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return numbers.float().mul_(scales[..., None])


def write(rows: Tensor, plane: Tensor, slots: Tensor) -> None:
    """Put `rows [n, kv_heads, dim]` into a plane `[slots, kv_heads, width]` of a cache."""
    for part, made in zip(views(plane, rows.shape[2]), encode(rows, plane.dtype), strict=True):
        part.index_copy_(0, slots, made)
