"""Where media are processed: on this machine's processor, or on a device, a part at a time. Knows no media and no family."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from ..mm.errors import InputError

MAX_TRANSFER_BYTES = 64 << 20
"""Bytes that go to a device at once, and as many that come back."""


class MediaDevice:
    """A device that decoded media go to and come back from, processed. Thread-safe.

    Each thread has a stream of its own there: what a worker waits for is its own work, and no step waits for a worker.
    Results lie in ordinary memory of the host, where caches count them, and are complete.

    Args:
        stream: makes a thread's stream, for tests.
    """

    def __init__(self, device: torch.device, stream: Callable[[], AbstractContextManager[object]] | None = None) -> None:
        self.device, self._make = device, stream or self._stream
        self._own = threading.local()

    def fill(self, parts: Iterable[tuple[Tensor, Tensor]], work: Callable[[Tensor], Tensor]) -> None:
        """Of each pair: what `work` makes of the first on the device, written to the second, of as many numbers, here.

        InputError where the device has no room.
        """
        try:
            for given, out in parts:
                out.copy_(work(given.to(self.device)).view(out.shape))  # waits for this thread's stream
        except torch.OutOfMemoryError as error:
            less = "lower gpu_memory_fraction, max_num_seqs or media_workers, or leave media_device out"
            raise InputError(f"{self.device} has no room to process it: {less}", code="out_of_memory") from error

    def stream(self) -> AbstractContextManager[object]:
        """Inside, this thread's work on the device is queued in its own stream."""
        if not hasattr(self._own, "stream"):
            self._own.stream = self._make()
        context: AbstractContextManager[object] = self._own.stream
        return context

    def _stream(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda":  # the interpreter of kernels has none
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))


_device: ContextVar[MediaDevice | None] = ContextVar("sensorium_media_device", default=None)


def media_device() -> MediaDevice | None:
    """That of this thread's work; None: media are processed where they were decoded."""
    return _device.get()


@contextmanager
def processing_on(device: MediaDevice | None) -> Iterator[None]:
    """Inside, in this thread, media are processed there."""
    token = _device.set(device)
    try:
        with nullcontext() if device is None else device.stream():
            yield
    finally:
        _device.reset(token)
