"""Layers with a state per sequence: causal convolution, and linear recurrence (Mamba 2, gated delta nets, linear attention).

A step reads the state of each sequence from one slot of a cache and writes the new one to another: the two entries of the
sequence's block table. A sequence whose first token is in the step begins with zeros. A row's bits depend only on its sequence,
not on the batch or on where the sequence is cut into chunks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .dispatch import backend
from .metadata import AttentionMetadata
from .native import call


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Convolve each channel of each sequence with its last inputs, summed in float32.

    Args:
        x: `[rows, channels]`; rows may be strided.
        weight: float32 `[taps, channels]`; the last tap is that of the row itself.
        bias: float32 `[channels]`.
        states: float32 `[slots, (taps - 1) * channels]`, slots may be strided: the last inputs, oldest first.

    Returns:
        `[rows, channels]` in x's dtype.
    """
    (taps, channels), chosen = weight.shape, backend("causal_conv", x.device, x.dtype) if x.stride(1) == 1 else "torch"
    if chosen == "triton":
        from .gpu import state as gpu_state

        return gpu_state.causal_conv(x, weight, bias, states, meta)
    if chosen == "native":
        out = torch.empty(x.shape, dtype=x.dtype)
        call("causal_conv", x.dtype, x, x.stride(0), weight, bias, out, channels, taps, *_sequences(states, meta))
        return out
    past = _read(states, meta).view(-1, taps - 1, channels)
    parts, found = [], []
    for i, (first, last) in enumerate(pairwise(meta.query_start_loc)):
        wide = torch.cat((past[i], x[first:last].float()))
        total = torch.zeros_like(wide[: last - first]) if bias is None else bias.expand(last - first, channels)
        for tap in range(taps):
            total = total + wide[tap : tap + last - first] * weight[tap]
        parts.append(total)
        found.append(wide[last - first :].flatten())
    _write(states, meta, torch.stack(found))
    return torch.cat(parts).to(x.dtype)


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor, meta: AttentionMetadata
) -> Tensor:
    """Compute `S = decay * S + k v'` and `q' S` for each row of a sequence in turn, with a matrix S per head.

    With `beta`, the delta rule replaces v by `beta * (v - k' (decay * S))` (arXiv 2412.06464).

    Args:
        q, k: float32 `[rows, key_heads, key_dim]`; adjacent heads of v share one of them.
        v: float32 `[rows, heads, value_dim]`.
        decay, beta: float32 `[rows, heads]`.
        states: float32 `[slots, heads * key_dim * value_dim]`, slots may be strided.

    Returns:
        float32 `[rows, heads, value_dim]`.
    """
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    chosen = backend("linear_recurrence", v.device, v.dtype)
    q, k, v, decay = q.contiguous(), k.contiguous(), v.contiguous(), decay.contiguous()
    beta = None if beta is None else beta.contiguous()
    if chosen == "triton":
        from .gpu import state as gpu_state

        return gpu_state.linear_recurrence(q, k, v, decay, beta, states, meta)
    if chosen == "native":
        out, sizes = torch.empty_like(v), (key_heads, heads, key_dim, value_dim)
        call("linear_recurrence", v.dtype, q, k, v, decay, beta, out, *sizes, *_sequences(states, meta))
        return out
    q, k = (part.repeat_interleave(heads // key_heads, 1) for part in (q, k))
    past, out = _read(states, meta).view(-1, heads, key_dim, value_dim), torch.empty_like(v)
    found = []
    for state, (first, last) in zip(past.unbind(), pairwise(meta.query_start_loc), strict=True):
        for row in range(first, last):
            state = state * decay[row, :, None, None]
            value = v[row]
            if beta is not None:
                value = (value - (state * k[row, :, :, None]).sum(1)) * beta[row, :, None]
            state = state + k[row, :, :, None] * value[:, None]
            out[row] = (state * q[row, :, :, None]).sum(1)
        found.append(state.flatten())
    _write(states, meta, torch.stack(found))
    return out


def _sequences(states: Tensor, meta: AttentionMetadata) -> tuple[int | Tensor, ...]:
    """Return the last arguments of the C++ kernels: places of rows, block tables and states."""
    starts, lens = meta.cpu_starts_and_lens
    tables = meta.block_tables
    return starts, lens, tables, tables.stride(0), len(tables), states, states.stride(0)


def _read(states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Return the states `[sequences, n]` that a step begins with."""
    on_cpu = states.device.type == "cpu"
    starts, lens = meta.cpu_starts_and_lens if on_cpu else meta.device_starts_and_lens
    has_past = lens > starts[1:] - starts[:-1]
    return torch.where(has_past[:, None], states[meta.block_tables[:, 0].long()], 0.0)


def _write(states: Tensor, meta: AttentionMetadata, found: Tensor) -> None:
    """Write each sequence's new state, in turn: padding sequences of a graph, of length 0, name a slot that is not theirs."""
    lens = (meta.cpu_starts_and_lens if states.device.type == "cpu" else meta.device_starts_and_lens)[1]
    for slot, length, state in zip(meta.block_tables[:, 1].long().split(1), lens.split(1), found.split(1), strict=True):
        states[slot] = torch.where(length[:, None] > 0, state, states[slot])
