"""Weights from the host to a device, read and copied at the same time. Knows no file and no layer.

What a copy leaves from has to be pinned, or the host waits for it. A piece at a time goes through one of two pinned buffers:
while a copy out of one goes on, the next piece is read into the other, from the file's pages. The host never holds more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

_BYTES = 32 << 20  # of a buffer: a copy takes about a millisecond, beside which starting it is nothing


class _Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def copier(device: torch.device) -> Callable[[Tensor, Tensor], object]:
    """What has a tensor there hold what another of its shape does, as `Tensor.copy_`."""
    return Upload() if device.type == "cuda" else Tensor.copy_


class Upload:
    """Copies that a later operation of the device's current stream finds done; the source may go at once.

    Args:
        pin: pinned memory of so many bytes. event: a new event of that stream. size: bytes of a buffer. For tests.
    """

    def __init__(
        self,
        pin: Callable[[int], Tensor] | None = None,
        event: Callable[[], _Event] | None = None,
        size: int = _BYTES,
    ) -> None:
        made: Callable[[], _Event] = event or torch.cuda.Event  # type: ignore[assignment]
        self._size, self._turn = size, 0
        self._buffers = [((pin or _pinned)(size), made()) for _ in range(2)]

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Other dtypes are converted on the device."""
        if source.device.type != "cpu":
            target.copy_(source)
            return
        for there, here in _pieces(target, source, self._size):
            memory, done = self._buffers[self._turn]
            self._turn ^= 1
            done.synchronize()
            pinned = memory[: here.nbytes].view(here.dtype).view(here.shape)
            pinned.copy_(here)
            self._send(there, pinned)
            done.record()

    def _send(self, target: Tensor, pinned: Tensor) -> None:
        same = target.dtype == pinned.dtype
        target.copy_(pinned if same else pinned.to(target.device, non_blocking=True), non_blocking=True)


def _pieces(target: Tensor, source: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in the same parts, none of more bytes than `most` in the source."""
    if source.nbytes <= most:
        yield target, source
        return
    rows = most * len(source) // source.nbytes
    if not rows:
        for there, here in zip(target, source, strict=True):
            yield from _pieces(there, here, most)
        return
    yield from zip(target.split(rows), source.split(rows), strict=True)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
