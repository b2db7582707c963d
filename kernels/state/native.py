"""Layers with a state per sequence, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata import AttentionMetadata
from ..native import call
from . import Decay, reference


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Compute `state.causal_conv`, in torch if the channels of x are not adjacent."""
    if x.stride(1) != 1:
        return reference.causal_conv(x, weight, bias, states, meta)
    (taps, channels), out = weight.shape, torch.empty(x.shape, dtype=x.dtype)
    call("causal_conv", x.dtype, x, x.stride(0), weight, bias, out, channels, taps, *_sequences(states, meta))
    return out


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay, beta: Tensor | None, states: Tensor, meta: AttentionMetadata
) -> Tensor:
    """Compute `state.linear_recurrence` on contiguous inputs, in torch if a state has more than one decay."""
    if not isinstance(decay, Tensor) or decay.ndim == 3:
        return reference.linear_recurrence(q, k, v, decay, beta, states, meta)
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out, sizes = torch.empty_like(v), (key_heads, heads, key_dim, value_dim)
    call("linear_recurrence", v.dtype, q, k, v, decay, beta, out, *sizes, *_sequences(states, meta))
    return out


def _sequences(states: Tensor, meta: AttentionMetadata) -> tuple[int | Tensor, ...]:
    """Return the last arguments of the C++ kernels: places of rows, block tables and states."""
    starts, lens = meta.cpu_starts_and_lens
    tables = meta.block_tables
    return starts, lens, tables, tables.stride(0), len(tables), states, states.stride(0)
