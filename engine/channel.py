"""Messages between two processes: bytes over a socket, large tensors through shared memory without a name."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from .codec import SharedTensors, decode, encode

_HEAD = struct.Struct("<QQ")  # bytes of the message, bytes of shared memory (0: no descriptor comes along)


class Channel:
    """One end of a socket pair. Each message is a header, the bytes of `codec.encode`, and at most one memfd.

    The receiver maps the memfd and the tensors of the message are views of the mapping, which lives as long as they do. The
    memory has no name, so nothing stays behind when either process is killed. One thread at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: bytes, shared: SharedTensors) -> None:
        """`data` and `shared` are from `pack`. OSError if the other side is gone."""
        head = _HEAD.pack(len(data), shared.num_bytes)
        if not shared.num_bytes:
            self._socket.sendall(head + data)
            return
        descriptor = _share(shared)
        try:
            socket.send_fds(self._socket, [head], [descriptor])
        finally:
            os.close(descriptor)
        self._socket.sendall(data)

    def receive(self) -> Any:
        """Wait for the next message. EOFError or OSError if the other side is gone."""
        head, descriptors = b"", []
        while len(head) < _HEAD.size:
            flags = socket.MSG_CMSG_CLOEXEC
            part, found, _, _ = socket.recv_fds(self._socket, _HEAD.size - len(head), 1, flags)
            if not part:
                raise EOFError
            head += part
            descriptors += found
        length, num_bytes = _HEAD.unpack(head)
        try:
            memory = _map(descriptors[0], num_bytes) if num_bytes else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return decode(self._read(length), memory)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            got = self._socket.recv_into(view[done:])
            if not got:
                raise EOFError
            done += got
        return data


def pack(message: object) -> tuple[bytes, SharedTensors]:
    """What `Channel.send` takes. TypeError for a value that no message may hold."""
    shared = SharedTensors()
    return encode(message, shared), shared


def _share(shared: SharedTensors) -> int:
    """A descriptor of memory that holds the tensors."""
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
    """uint8 `[num_bytes]` over the memory; keeps no descriptor open."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
