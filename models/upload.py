"""Copies weights from the host to a device while the next ones are read.

Copies from pageable memory block the host. Tensors therefore go through two pinned buffers, in pieces: while one buffer is
copied to the device, the next piece is read from the file's pages into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels.streams import Event, pinned_buffer

_BYTES = 32 << 20  # bytes of a buffer: copying it takes about 1 ms, much longer than launching the copy


Copy = Callable[[Tensor, Tensor], object]
"""Copies to the first tensor from the second, like `Tensor.copy_`."""


def copier(device: torch.device) -> Copy:
    """Return the function that copies from the host to tensors on `device`."""
    return Upload() if device.type == "cuda" else Tensor.copy_


class Upload:
    """Asynchronous copies on the device's current stream; the source may be freed as soon as the call returns.

    Args:
        pin: allocates pinned memory, event: creates an event, size: bytes of a buffer; for tests.
    """

    def __init__(
        self, pin: Callable[[int], Tensor] | None = None, event: Callable[[], Event] | None = None, size: int = _BYTES
    ) -> None:
        make = event or torch.cuda.Event
        self._size, self._turn = size, 0
        self._buffers = [((pin or pinned_buffer)(size), make()) for _ in range(2)]

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`; a different dtype is converted on the device."""
        if source.device.type != "cpu":
            target.copy_(source)
            return
        for target_piece, source_piece in _pieces(target, source, self._size):
            memory, done = self._buffers[self._turn]
            self._turn ^= 1
            done.synchronize()
            pinned = memory[: source_piece.nbytes].view(source_piece.dtype).view(source_piece.shape)
            pinned.copy_(source_piece)
            self._send(target_piece, pinned)
            done.record()

    def _send(self, target: Tensor, pinned: Tensor) -> None:
        same = target.dtype == pinned.dtype
        target.copy_(pinned if same else pinned.to(target.device, non_blocking=True), non_blocking=True)


def _pieces(target: Tensor, source: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both tensors alike into pieces of at most `most` bytes of the source."""
    if source.nbytes <= most:
        yield target, source
        return
    rows = most * len(source) // source.nbytes
    if not rows:
        for target_row, source_row in zip(target, source, strict=True):
            yield from _pieces(target_row, source_row, most)
        return
    yield from zip(target.split(rows), source.split(rows), strict=True)
