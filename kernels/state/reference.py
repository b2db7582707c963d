"""Layers with a state per sequence, in torch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..metadata import AttentionMetadata
from . import Decay, StepDecay


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Compute `state.causal_conv`."""
    taps, channels = weight.shape
    past = _read(states, meta).view(-1, taps - 1, channels)
    parts, last_rows = [], []
    for i, (first, last) in enumerate(pairwise(meta.query_start_loc)):
        wide = torch.cat((past[i], x[first:last].float()))
        total = torch.zeros_like(wide[: last - first]) if bias is None else bias.expand(last - first, channels)
        for tap in range(taps):
            total = total + wide[tap : tap + last - first] * weight[tap]
        parts.append(total)
        last_rows.append(wide[last - first :].flatten())
    _write(states, meta, torch.stack(last_rows))
    return torch.cat(parts).to(x.dtype)


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay, beta: Tensor | None, states: Tensor, meta: AttentionMetadata
) -> Tensor:
    """Compute `state.linear_recurrence`."""
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out = torch.empty_like(v)
    for i, (first, last) in enumerate(pairwise(meta.query_start_loc)):
        state = _read(states, meta, slice(i, i + 1)).view(heads, key_dim, value_dim)
        for row in range(first, last):
            key, query = (part[row].repeat_interleave(heads // key_heads, 0)[:, :, None] for part in (k, q))
            state.mul_(_factors(decay, row))
            value = v[row]
            if beta is not None:
                value = (value - (state * key).sum(1)) * beta[row, :, None]
            state.addcmul_(key, value[:, None])
            out[row] = (state * query).sum(1)
        _write(states, meta, state.view(1, -1), slice(i, i + 1))
    return out


def _factors(decay: Decay, row: int) -> Tensor:
    """Return what the states `[heads, key_dim, value_dim]` are multiplied by before a row."""
    if isinstance(decay, StepDecay):
        return (decay.rates * decay.steps[row, :, None]).exp_()
    return decay[row, :, None, None] if decay.ndim == 2 else decay[row, :, :, None]


def _read(states: Tensor, meta: AttentionMetadata, sequences: slice = slice(None)) -> Tensor:
    """Return the states `[sequences, n]` that a step begins with."""
    on_cpu = states.device.type == "cpu"
    starts, lens = meta.cpu_starts_and_lens if on_cpu else meta.device_starts_and_lens
    has_past = (lens > starts[1:] - starts[:-1])[sequences]
    return torch.where(has_past[:, None], states[meta.block_tables[sequences, 0].long()], 0.0)


def _write(states: Tensor, meta: AttentionMetadata, new_states: Tensor, sequences: slice = slice(None)) -> None:
    """Write each sequence's new state, in turn: padding sequences of a graph, of length 0, name a slot that is not theirs."""
    lens = (meta.cpu_starts_and_lens if states.device.type == "cpu" else meta.device_starts_and_lens)[1][sequences]
    for slot, length, state in zip(
        meta.block_tables[sequences, 1].long().split(1), lens.split(1), new_states.split(1), strict=True
    ):
        states[slot] = torch.where(length[:, None] > 0, state, states[slot])
