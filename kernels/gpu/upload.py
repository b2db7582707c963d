"""Small lookup tables of kernels: uploaded once, then shared by streams and CUDA graphs."""

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
    """Copy the table to the device and wait for that copy only, not for queued work. All streams may use the result."""
    if device.type != "cuda":
        return table
    stream = _stream(device)
    with torch.cuda.stream(stream):
        uploaded = table.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return uploaded


def keep_alive(table: Tensor) -> Tensor:
    """Keep a cached table alive while this stream, or a CUDA graph that is being captured, reads it. Returns the table."""
    if table.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            _captured.get()[id(table)] = table
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    return table


@contextmanager
def capture_tables() -> Iterator[dict[int, Tensor]]:
    """Collect the tables that a CUDA graph captured in this thread reads. Outside this context, they are kept forever."""
    tables: dict[int, Tensor] = {}
    token = _captured.set(tables)
    try:
        yield tables
    finally:
        _captured.reset(token)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
