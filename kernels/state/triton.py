"""Causal convolution and linear recurrence with a state per sequence, in Triton.

The recurrence takes the rows of a sequence in turn, so that a row's bits do not depend on where a prompt is cut. Long prompts
would be faster in chunks of rows (arXiv 2405.21060), with other bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from ..metadata import AttentionMetadata
from . import Decay, StepDecay, reference


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, states_ptr, sequences_ptr, starts_ptr, lens_ptr, tables_ptr,
    channels, x_row, states_row, tables_row,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK channels of one row; the last row of a sequence also writes its state."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    sequence = tl.load(sequences_ptr + row)
    first, last = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    length = tl.load(lens_ptr + sequence)
    has_past = length > last - first
    past_ptr = states_ptr + tl.load(tables_ptr + sequence * tables_row).to(tl.int64) * states_row + at
    next_ptr = states_ptr + tl.load(tables_ptr + sequence * tables_row + 1).to(tl.int64) * states_row + at
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0)
    writes = (row == last - 1) & (length > 0)
    for tap in tl.static_range(TAPS):
        source = row - first - (TAPS - 1) + tap
        in_step, in_state = source >= 0, (source < 0) & has_past
        value = tl.load(x_ptr + (first + source).to(tl.int64) * x_row + at, mask=inside & in_step, other=0.0).to(tl.float32)
        value += tl.load(past_ptr + (source + TAPS - 1) * channels, mask=inside & in_state, other=0.0)
        total += value * tl.load(weight_ptr + tap * channels + at, mask=inside, other=0.0)
        if tap > 0:
            tl.store(next_ptr + (tap - 1) * channels, value, mask=inside & writes)
    tl.store(out_ptr + row.to(tl.int64) * channels + at, total, mask=inside)


@triton.jit
def _recurrence_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, beta_ptr, out_ptr, states_ptr, starts_ptr, lens_ptr, tables_ptr,
    heads, key_heads, key_dim, value_dim, states_row, tables_row,
    DELTA: tl.constexpr, BY_KEY: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK values of one head of one sequence, row by row; the state stays in registers.

    BY_KEY: decays are `[rows, heads, key_dim]`. With `rate_ptr`, they are the steps of a StepDecay.
    """
    sequence, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(starts_ptr + sequence).to(tl.int64), tl.load(starts_ptr + sequence + 1).to(tl.int64)
    length = tl.load(lens_ptr + sequence)
    in_keys, in_values = key < key_dim, value < value_dim
    inside = in_keys[:, None] & in_values[None]
    offset = (head * key_dim + key[:, None]) * value_dim + value[None]
    read, write = tl.load(tables_ptr + sequence * tables_row), tl.load(tables_ptr + sequence * tables_row + 1)
    has_past = length > last - first
    state = tl.load(states_ptr + read.to(tl.int64) * states_row + offset, mask=inside & has_past, other=0.0)
    key_head = head // (heads // key_heads)
    if rate_ptr is not None:
        rates = tl.load(rate_ptr + offset, mask=inside, other=0.0)
    for row in range(first, last):
        keys = (row * key_heads + key_head) * key_dim + key
        q, k = tl.load(q_ptr + keys, mask=in_keys, other=0.0), tl.load(k_ptr + keys, mask=in_keys, other=0.0)
        values = (row * heads + head) * value_dim + value
        v = tl.load(v_ptr + values, mask=in_values, other=0.0)
        if rate_ptr is not None:
            state *= tl.exp(rates * tl.load(decay_ptr + values, mask=in_values, other=0.0)[None])
        elif BY_KEY:
            state *= tl.load(decay_ptr + (row * heads + head) * key_dim + key, mask=in_keys, other=0.0)[:, None]
        else:
            state *= tl.load(decay_ptr + row * heads + head)
        if DELTA:
            v = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + row * heads + head)
        state += k[:, None] * v[None]
        tl.store(out_ptr + values, tl.sum(state * q[:, None], 0), mask=in_values)
    tl.store(states_ptr + write.to(tl.int64) * states_row + offset, state, mask=inside & (length > 0))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Compute `state.causal_conv`, in torch if the channels of x are not adjacent."""
    if x.stride(1) != 1:
        return reference.causal_conv(x, weight, bias, states, meta)
    (taps, channels), out = weight.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = launch_config.get_config("causal_conv")
    tensors = x, weight, bias, out, states, _sequence_of_row(meta), *meta.device_starts_and_lens, meta.block_tables
    sizes = channels, x.stride(0), states.stride(0), meta.block_tables.stride(0)
    grid = (len(x), triton.cdiv(channels, config["BLOCK"]))
    _conv_kernel[grid](*tensors, *sizes, TAPS=taps, HAS_BIAS=bias is not None, **config)
    return out


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay, beta: Tensor | None, states: Tensor, meta: AttentionMetadata
) -> Tensor:
    """Compute `state.linear_recurrence` on contiguous inputs."""
    (_, key_heads, key_dim), (_, heads, value_dim) = k.shape, v.shape
    out, config = torch.empty_like(v), launch_config.get_config("linear_recurrence")
    decay, rates = decay if isinstance(decay, StepDecay) else (decay, None)
    tensors = q, k, v, decay, rates, beta, out, states, *meta.device_starts_and_lens, meta.block_tables
    sizes = heads, key_heads, key_dim, value_dim, states.stride(0), meta.block_tables.stride(0)
    grid = (len(meta.seq_lens), heads, triton.cdiv(value_dim, config["BLOCK"]))
    keys = triton.next_power_of_2(key_dim)
    flags = {"DELTA": beta is not None, "BY_KEY": decay.ndim == 3, "KEYS": keys}
    _recurrence_kernel[grid](*tensors, *sizes, **flags, **config)
    return out


def _sequence_of_row(meta: AttentionMetadata) -> Tensor:
    """Return the sequence of each row, int32 `[rows]`, made once per step."""
    sequence_of_row = meta.backend_cache.get("sequence_of_row")
    if sequence_of_row is None:
        starts = torch.tensor(meta.query_start_loc)
        rows = torch.repeat_interleave(torch.arange(len(starts) - 1, dtype=torch.int32), starts.diff())
        sequence_of_row = meta.backend_cache["sequence_of_row"] = meta.on_device(rows)
    return sequence_of_row
