"""Paged attention for a batch that mixes prompt chunks and decode rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import implementation
from ..metadata import AttentionMetadata
from .sdpa import gather_context

_WEIGHTS_ROWS = 64  # rows whose weights are computed at once


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write this step's keys and values to the cache, then attend. Each row attends to a range of keys, usually the causal one.

    Args:
        q: `[rows, heads, dim]`; `heads` is a multiple of `kv_heads` (grouped-query attention).
        k, v: `[rows, kv_heads, dim]` of this step, one row per slot of `meta.slot_mapping`. v is None if keys are also the
            values (MLA). Both are None if they are in the cache already (`qkv_prepare.prepare_qkv`, or another layer's).
        kv_cache: `[2, blocks, block_size, kv_heads, dim]`, or `[1, ...]` if keys are also the values. A quantised cache
            (`kv_quant`) has `bytes_per_head` in place of `dim`. Written in place. Rows attend to the cached keys: with a
            quantised cache, to quantised keys even in the step that writes them.
        scale: factor of the scores, usually `dim ** -0.5`.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`. None: no cap.
        sinks: float32 `[heads]`: attention sinks, the score of one extra key per head, which takes a share of the softmax.

    Returns:
        `[rows, heads, dim]`.
    """
    attended: Tensor = implementation("attention", q.device, q.dtype, q.shape[2]).paged_attention(
        q, k, v, kv_cache, meta, scale, soft_cap, sinks
    )
    return attended


def write_cache(k: Tensor, v: Tensor | None, kv_cache: Tensor, meta: AttentionMetadata) -> None:
    """Write this step's keys and values to the cache without attention. Arguments: as in `paged_attention`."""
    implementation("attention", k.device, k.dtype, k.shape[2]).write_cache(k, v, kv_cache, meta)


def attention_weights(
    q: Tensor, kv_cache: Tensor, meta: AttentionMetadata, request: int, heads: Sequence[int], scale: float
) -> Tensor:
    """Return the weights of some heads of a request whose rows attend to all keys: float32 `[heads, rows, keys]` on the CPU.

    The cache holds the keys already. `heads` are query heads.
    """
    keys = gather_context(q, kv_cache[:1], meta, request, 0)[0][:, [head * kv_cache.shape[3] // q.shape[1] for head in heads]]
    keys = keys.float().permute(1, 2, 0)
    rows = q[meta.query_start_loc[request] : meta.query_start_loc[request + 1], list(heads)].transpose(0, 1).float()
    parts = rows.split(_WEIGHTS_ROWS, 1)  # on a GPU, the weights of a long prompt take much memory
    return torch.cat([((part @ keys) * scale).softmax(-1).cpu() for part in parts], 1)
