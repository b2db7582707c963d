"""Copies the small tensors of a step to the device, through pinned buffers.

A copy from pinned memory continues while the host prepares the next step. Two buffers take turns, and a buffer is written
again only when all copies from it are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...kernels.streams import Event, new_event, pinned_buffer

ToDevice = Callable[[np.ndarray], Tensor]
"""Copies an array to the model's device."""
_ALIGN = 64  # bytes between the beginnings of two arrays


@dataclass(eq=False)
class _PinnedBuffer:
    """Pinned memory, the bytes of it that this step has used, and the event after the last copy from it."""

    event: Event
    memory: Tensor
    used: int = 0
    outgrown: list[Tensor] = field(default_factory=list)  # smaller memory of this step, kept until its copies are done


class StagingBuffers:
    """Copies arrays to the device (a ToDevice). It is also the context manager of each step. On a CPU it copies nothing.

    Args:
        pin, event: functions that allocate pinned memory and make an event; for tests.
    """

    def __init__(
        self,
        device: torch.device,
        pin: Callable[[int], Tensor] | None = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        self._device, self._pin = device, pin or pinned_buffer
        self._buffers: Sequence[_PinnedBuffer] = ()
        if device.type != "cpu" or pin is not None:
            make = event or partial(new_event, device)
            self._buffers = [_PinnedBuffer(make(), self._pin(1 << 16)) for _ in range(2)]
        self._turn = 0

    def __enter__(self) -> StagingBuffers:
        """Start a step: take the other buffer, once its copies are done."""
        if self._buffers:
            self._turn ^= 1
            buffer = self._buffers[self._turn]
            buffer.event.synchronize()
            buffer.used, buffer.outgrown = 0, []
        return self

    def __exit__(self, *_: object) -> None:
        """End the step, after all its copies were started."""
        if self._buffers:
            self._buffers[self._turn].event.record()

    def __call__(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        if not self._buffers:
            return host
        pinned = self._reserve(host)
        pinned.copy_(host)
        return self._send(pinned)

    def _send(self, pinned: Tensor) -> Tensor:
        return pinned.to(self._device, non_blocking=True)

    def _reserve(self, like: Tensor) -> Tensor:
        """Return pinned memory of the same shape and dtype."""
        buffer = self._buffers[self._turn]
        start = -(-buffer.used // _ALIGN) * _ALIGN
        if start + like.nbytes > len(buffer.memory):
            buffer.outgrown.append(buffer.memory)
            buffer.memory, start = self._pin(2 * max(len(buffer.memory), like.nbytes)), 0
        buffer.used = start + like.nbytes
        return buffer.memory[start : buffer.used].view(like.dtype).view(like.shape)
