"""Small tables that kernels read: from the host to the device once, then used by whoever asks. Knows no kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_for_good: dict[int, Tensor] = {}
_captured: ContextVar[dict[int, Tensor]] = ContextVar("sensorium_captured", default=_for_good)


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
    """The table, which a cache may drop while this stream still reads it; what a CUDA graph reads is for the graph to keep."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _captured.get()[id(table)] = table
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table


@contextmanager
def keeping() -> Iterator[dict[int, Tensor]]:
    """Tables that a CUDA graph reads that is recorded inside, in this thread; without it they are kept for good."""
    tables: dict[int, Tensor] = {}
    token = _captured.set(tables)
    try:
        yield tables
    finally:
        _captured.reset(token)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
