"""Messages between two processes: bytes over a pipe, large tensors through anonymous shared memory."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from .codec import SharedTensors, decode, encode

_PAGE = 4096
_HEAD = struct.Struct("<Q")  # bytes of shared memory; 0: no descriptor follows


class Channel:
    """One end of a duplex pipe. Each message is a header, the bytes of `codec.encode`, and at most one memfd.

    The receiver maps the memfd. The tensors of the message are views of the mapping, which lives as long as they do. The
    memory has no name, so nothing stays behind when a process is killed. Use a channel from one thread at a time.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, data: bytes, shared: SharedTensors) -> None:
        """Send a message that `pack` returned. Raise OSError if the other side is gone."""
        if not shared.num_bytes:
            self._connection.send_bytes(_HEAD.pack(0) + data)
            return
        descriptor = _share(shared)
        try:
            self._connection.send_bytes(_HEAD.pack(shared.num_bytes) + data)
            send_handle(self._connection, descriptor, None)
        finally:
            os.close(descriptor)

    def receive(self) -> Any:
        """Wait for the next message and return it. Raise EOFError or OSError if the other side is gone."""
        data, memory = self._connection.recv_bytes(), None
        (num_bytes,) = _HEAD.unpack_from(data)
        if num_bytes:
            descriptor = recv_handle(self._connection)
            try:
                memory = _map(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        return decode(memoryview(data)[_HEAD.size :], memory)

    def close(self) -> None:
        self._connection.close()


class Activity:
    """A page that two processes share. One writes what it works on, the other reads that after the first one has died."""

    def __init__(self, fileno: int | None = None) -> None:
        """Make a page, or map the page of an inherited descriptor."""
        self.fileno = os.memfd_create("activity") if fileno is None else fileno
        os.ftruncate(self.fileno, _PAGE)
        self._page = mmap.mmap(self.fileno, _PAGE)

    def write(self, keys: Iterable[str]) -> None:
        """Replace the keys. Those that do not fit are left out."""
        data = "\n".join(keys).encode()[: _PAGE - _HEAD.size]
        self._page[: _HEAD.size] = _HEAD.pack(0)
        self._page[_HEAD.size : _HEAD.size + len(data)] = data
        self._page[: _HEAD.size] = _HEAD.pack(len(data))

    def read(self) -> list[str]:
        (size,) = _HEAD.unpack(self._page[: _HEAD.size])
        return bytes(self._page[_HEAD.size :][:size]).decode(errors="replace").split()

    def close(self) -> None:
        if not self._page.closed:  # closed once: the descriptor's number may have another owner by now
            self._page.close()
            os.close(self.fileno)


def pack(message: object) -> tuple[bytes, SharedTensors]:
    """Return the arguments of `Channel.send`. Raise TypeError for a value that a message cannot hold."""
    shared = SharedTensors()
    return encode(message, shared), shared


def _share(shared: SharedTensors) -> int:
    """Return a descriptor of memory that holds the tensors."""
    descriptor = os.memfd_create("sensorium", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, shared.num_bytes)
        memory = _map(descriptor, shared.num_bytes)
        for offset, tensor in shared.tensors:
            size = tensor.numel() * tensor.itemsize
            memory[offset : offset + size].view(tensor.dtype).copy_(tensor.reshape(-1))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """Return the memory as uint8 `[num_bytes]`; this keeps no descriptor open."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
