"""Small tensors of a step between host and device, so that neither waits for the other. Knows no step.

A copy out of pinned memory goes on while the host writes the next step's numbers. So there are two sets of buffers, taken by
turns, and a set is written again only when all copies out of it are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Place = Callable[[np.ndarray], Tensor]
"""An array to where the model is."""
_ALIGN = 64  # bytes between the beginnings of two arrays


class Event(Protocol):
    """What of torch.cuda.Event is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(eq=False)
class _Set:
    """Pinned bytes, how many of them this step has used, and the end of the copies out of them."""

    event: Event
    memory: Tensor
    used: int = 0
    retired: list[Tensor] = field(default_factory=list)  # outgrown in this step, and read until its end


class Staging:
    """Arrays to a device.

    Args:
        pin: pinned memory of so many bytes. event: a new event of the stream that the copies go to. For tests.
    """

    def __init__(
        self,
        device: torch.device,
        pin: Callable[[int], Tensor] | None = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        self._device, self._pin = device, pin or _pinned
        self._sets: Sequence[_Set] = ()
        if device.type != "cpu" or pin is not None:
            made = event or torch.cuda.Event
            self._sets = [_Set(made(), self._pin(1 << 16)) for _ in range(2)]  # type: ignore[arg-type]
        self._turn = 0

    def __enter__(self) -> Staging:
        """A step starts: from now on the other set, once its copies are done."""
        if self._sets:
            self._turn ^= 1
            now = self._sets[self._turn]
            now.event.synchronize()
            now.used, now.retired = 0, []
        return self

    def __exit__(self, *_: object) -> None:
        """Everything of this step was handed over."""
        if self._sets:
            self._sets[self._turn].event.record()

    def __call__(self, array: np.ndarray) -> Tensor:
        """On the device; on a CPU the array's own memory."""
        host = torch.from_numpy(array)
        if not self._sets:
            return host
        pinned = self._take(host)
        pinned.copy_(host)
        return self._send(pinned)

    def _send(self, pinned: Tensor) -> Tensor:
        return pinned.to(self._device, non_blocking=True)

    def _take(self, like: Tensor) -> Tensor:
        now = self._sets[self._turn]
        start = -(-now.used // _ALIGN) * _ALIGN
        if start + like.nbytes > len(now.memory):
            now.retired.append(now.memory)
            now.memory, start = self._pin(2 * max(len(now.memory), like.nbytes)), 0
        now.used = start + like.nbytes
        return now.memory[start : now.used].view(like.dtype).view(like.shape)


def fetch(tensor: Tensor) -> Callable[[], list[float]]:
    """Start to copy a vector to the host; the call waits for it."""
    if tensor.device.type == "cpu":
        return tensor.tolist
    host, done = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(tensor, non_blocking=True)
    done.record()

    def wait() -> list[float]:
        done.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
