"""Messages between two processes: bytes over a pipe, large tensors through anonymous shared memory."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from .codec import SharedTensors, decode, encode

_PAGE = 4096
_HEAD = struct.Struct("<Q")  # bytes of shared memory; 0: no descriptor follows
Packed = tuple[bytes, int | None]
"""A message and the descriptor of its shared memory, which `Channel.send` closes."""


class Channel:
    """One end of a duplex pipe. Each message is a header, the bytes of `codec.encode`, and at most one memfd.

    The receiver maps the memfd. The tensors of the message are views of the mapping, which lives as long as they do. The
    memory has no name, so nothing stays behind when a process is killed. Use a channel from one thread at a time.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))  # for descriptors: sending one must not need another
        self._closing = threading.Lock()  # acquired by the thread that closes this end, and never released

    def send(self, data: bytes, descriptor: int | None) -> None:
        """Send a message that `pack` returned. Raise OSError if the other side is gone."""
        try:
            self._connection.send_bytes(data)
            if descriptor is not None:
                socket.send_fds(self._socket, [b"d"], [descriptor])
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> Any:
        """Wait for the next message and return it. Raise EOFError or OSError if the other side is gone."""
        data, memory = self._connection.recv_bytes(), None
        (num_bytes,) = _HEAD.unpack_from(data)
        if num_bytes:
            _, descriptors, *_ = socket.recv_fds(self._socket, 1, 1)
            if not descriptors:
                raise EOFError
            try:
                memory = _map(descriptors[0], num_bytes)
            finally:
                os.close(descriptors[0])
        return decode(memoryview(data)[_HEAD.size :], memory)

    def close(self) -> None:
        """Close this end, in any thread. Only the first call does: its descriptor's number may be reused later."""
        if self._closing.acquire(blocking=False):
            self._connection.close()
            self._socket.close()


class Activity:
    """A page that two processes share. One writes what it works on, the other reads that after the first one has died."""

    def __init__(self, fileno: int | None = None) -> None:
        """Make a page, or map the page of an inherited descriptor."""
        self.fileno = os.memfd_create("activity") if fileno is None else fileno
        os.ftruncate(self.fileno, _PAGE)
        self._page = mmap.mmap(self.fileno, _PAGE)
        self._closing = threading.Lock()  # as in `Channel`

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
        if self._closing.acquire(blocking=False):
            self._page.close()
            os.close(self.fileno)


def pack(message: object, share: bool = True) -> Packed:
    """Return the arguments of `Channel.send`. `share`: put large tensors in shared memory.

    Raises:
        TypeError: a value that a message cannot hold.
        MemoryError: there is no descriptor or no memory for the tensors.
    """
    shared = SharedTensors() if share else None
    data, size = encode(message, shared), shared.num_bytes if shared else 0
    return _HEAD.pack(size) + data, _share(shared) if shared and size else None


def duplicate(packed: Packed) -> Packed:
    """Return a message with the same memory and a descriptor of its own. Raise MemoryError if there is none."""
    data, descriptor = packed
    try:
        return data, None if descriptor is None else os.dup(descriptor)
    except OSError as error:
        raise MemoryError(f"no descriptor for shared memory ({error})") from None


def discard(packed: Packed) -> None:
    """Free a message that will not be sent."""
    if packed[1] is not None:
        os.close(packed[1])


def _share(shared: SharedTensors) -> int:
    """Return a descriptor of memory that holds the tensors."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("sensorium", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, shared.num_bytes)
        memory = _map(descriptor, shared.num_bytes)
        for offset, tensor in shared.tensors:
            size = tensor.numel() * tensor.itemsize
            memory[offset : offset + size].view(tensor.dtype).copy_(tensor.reshape(-1))
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError | RuntimeError):  # RuntimeError: torch's
            raise MemoryError(f"no shared memory for {shared.num_bytes:,} bytes of tensors ({error})") from None
        raise
    return descriptor


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """Return the memory as uint8 `[num_bytes]`; this keeps no descriptor open."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
