"""Between the product of queries, keys and values and attention: norms of heads, rotation, cache. Knows no model."""

from __future__ import annotations

from torch import Tensor

from .dispatch import backend
from .metadata import AttentionMetadata
from .norm import norm_heads_
from .rope import rotate_

Norms = tuple[Tensor, Tensor, float, float]
"""Weights `[dim]` of queries and keys, eps, and the offset of both weights."""
Parts = tuple[Tensor, Tensor | None, Tensor | None]


def place(
    qkv: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    turns: tuple[Tensor, Tensor] | None,
    neighbours: bool = False,
    norms: Norms | None = None,
) -> Parts:
    """Norm and turn queries and keys, in place: what `paged_attention` takes.

    Args:
        qkv: `[rows, heads + 2 * kv_heads, dim]`, the heads of a row end to end.
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, or in place of `dim` the width of a row in 8 bits (`kv8`).
        turns: cosines and sines, float32 `[rows, half]`, of the first `2 * half` numbers of a head; None: no positions.
        neighbours: as in `rotate_`.
        norms: of each head by itself; None: none.

    Returns:
        Queries, keys, values; keys and values None where they were put into the cache on the way, on a GPU.
    """
    device, dtype, dim = qkv.device, qkv.dtype, qkv.shape[2]
    kv_heads = kv_cache.shape[3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if all(backend(op, device, dtype, dim) == "triton" for op in ("rotary_cache", "attention")):
        from .gpu import rope

        rope.place_(qkv, kv_cache, meta.slot_mapping, turns, neighbours, norms)
        return q, None, None
    if norms is not None:
        norm_heads_(q, norms[0], *norms[2:])
        norm_heads_(k, norms[1], *norms[2:])
    if turns is not None:
        rotate_(qkv[:, :-kv_heads, : 2 * turns[0].shape[1]], *turns, neighbours)
    return q, k, v
