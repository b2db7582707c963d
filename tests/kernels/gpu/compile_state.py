"""Launches of layers with a state: a chunk of a prompt and decode rows.

The shapes are those of Qwen3-Next, Granite 4, LFM2, MiniMax-Text-01, Kimi Linear and Falcon-Mamba.
"""

from __future__ import annotations

import torch
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.state import StepDecay
from sensorium.kernels.state import triton as state

HOT = {"_conv_kernel", "_recurrence_kernel"}


def batch(rows: int, sequences: int) -> AttentionMetadata:
    starts = tuple(i * rows for i in range(sequences + 1))
    tables = torch.zeros(sequences, 2, dtype=torch.int32)
    return AttentionMetadata(starts, (4096,) * sequences, tables, torch.zeros(0, dtype=torch.int64), 16)


def launches() -> None:
    for rows, sequences in ((512, 2), (1, 64)):
        meta, total = batch(rows, sequences), rows * sequences
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for channels, taps, bias in ((8192, 4, None), (3328, 4, torch.empty(3328)), (2048, 3, None)):
                states = torch.empty(64, (taps - 1) * channels + 128)
                state.causal_conv(
                    torch.empty(total, channels + 64, dtype=dtype)[:, :channels],
                    torch.empty(taps, channels),
                    bias,
                    states,
                    meta,
                )
        shapes = (16, 32, 128, 128, True), (1, 48, 128, 64, False), (64, 64, 128, 128, False)
        for key_heads, heads, key_dim, value_dim, delta in shapes:
            q, v = torch.empty(total, key_heads, key_dim), torch.empty(total, heads, value_dim)
            decay, states = torch.empty(total, heads), torch.empty(64, heads * key_dim * value_dim)
            state.linear_recurrence(q, q, v, decay, decay if delta else None, states, meta)
        q, v = torch.empty(total, 32, 128), torch.empty(total, 32, 128)
        state.linear_recurrence(q, q, v, q, torch.empty(total, 32), torch.empty(64, 32 * 128 * 128), meta)
        q, v = torch.empty(total, 1, 16), torch.empty(total, 128, 64)
        state.linear_recurrence(q, q, v, StepDecay(v, torch.empty(128, 16, 64)), None, torch.empty(64, 128 * 16 * 64), meta)
