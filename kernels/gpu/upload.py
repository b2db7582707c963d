"""Small tables that kernels read: from the host to the device once, then used by whoever asks. Knows no kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_captured: dict[int, Tensor] = {}


def upload(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device, there for every stream when this returns; waits for the copy alone, not for what is queued."""
    if device.type != "cuda":
        return table
    stream = _stream(device)
    with torch.cuda.stream(stream):
        there = table.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return there


def used(table: Tensor) -> Tensor:
    """The table, which a cache may drop while this stream still reads it; what a CUDA graph reads is kept for good."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _captured[id(table)] = table
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
