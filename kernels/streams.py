"""Asynchronous copies between host and device: events, pinned memory, and vectors that the host reads later."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """The methods of torch.cuda.Event that this package uses."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CompletedEvent:
    """An Event on a CPU, where work is done when its call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def new_event(device: torch.device) -> Event:
    """Create an event for the device's current stream."""
    return torch.cuda.Event() if device.type == "cuda" else CompletedEvent()


def pinned_buffer(size: int) -> Tensor:
    """Allocate `size` bytes of pinned memory, from which a device copies while the host goes on."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def copy_to_host(*vectors: Tensor) -> Callable[[], list[float]]:
    """Start to copy vectors to the host. The returned function waits for the copy and returns their numbers, concatenated."""
    if vectors[0].device.type == "cpu":
        return lambda: list(chain.from_iterable(vector.tolist() for vector in vectors))
    joined = vectors[0] if len(vectors) == 1 else torch.cat([vector.double() for vector in vectors])
    host, done = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True), new_event(joined.device)
    host.copy_(joined, non_blocking=True)
    done.record()

    def wait() -> list[float]:
        done.synchronize()
        return host.tolist()

    return wait
