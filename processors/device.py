"""The device that media are processed on, if it is not the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from ..callers.errors import InputError

MAX_TRANSFER_BYTES = 64 << 20
"""Size limit of one copy to a device, and of one copy back."""


class MediaDevice:
    """A device that processes decoded media. Thread-safe.

    Each thread has its own stream, so a worker waits only for its own work and the model's steps do not wait for a worker.
    Results are copied to ordinary host memory, where caches count them.

    Args:
        stream: makes a thread's stream; tests pass their own.
    """

    def __init__(self, device: torch.device, stream: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        self.device, self._make = device, stream or self._stream
        self._own = threading.local()

    def fill(self, parts: Iterable[tuple[Tensor, Tensor]], work: Callable[[Tensor], Tensor]) -> None:
        """Apply `work` on the device to the first tensor of each pair, and copy the result to the second, of equal size.

        Raises:
            InputError: the device is out of memory.
        """
        try:
            for source, out in parts:
                out.copy_(work(source.to(self.device)).view(out.shape))  # waits for this thread's stream
        except torch.OutOfMemoryError as error:
            less = "lower <<gpu_memory_fraction>>, <<max_num_seqs>> or <<media_workers>>, or leave <<media_device>> out"
            raise InputError(f"{self.device} has too little memory to process it: {less}", code="out_of_memory") from error

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's work on the device runs in its own stream."""
        if not hasattr(self._own, "stream"):
            self._own.stream = self._make()
        context: AbstractContextManager[object] = self._own.stream
        return context

    def _stream(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda":  # the kernel interpreter has no streams
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))


_device: ContextVar[MediaDevice | None] = ContextVar("sensorium_media_device", default=None)


def media_device() -> MediaDevice | None:
    """Return the device that this thread processes media on; None: the CPU."""
    return _device.get()


@contextmanager
def processing_on(device: MediaDevice | None) -> Iterator[None]:
    """Process media on `device` inside the context, in this thread."""
    token = _device.set(device)
    try:
        with nullcontext() if device is None else device.stream():
            yield
    finally:
        _device.reset(token)
