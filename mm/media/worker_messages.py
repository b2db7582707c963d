"""Messages between the engine and its worker processes. It imports no torch, so that workers without torch start faster."""

from __future__ import annotations

import mmap
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

_LENGTH = struct.Struct("<Q")
_MAPPED = 1 << 16  # bytes from which a buffer is mapped: a bytearray would be filled with zeros first


class WorkerReply(msgspec.Struct):
    """Outcome of an item: "value", "input" (`value` has the fields of an InputError), "memory" or "bug" (`text`: traceback)."""

    kind: str
    text: str = ""
    value: object = None


class WorkerRequest(msgspec.Struct):
    """Call of `module.name(data, *args)`; `data` follows the message."""

    module: str
    name: str
    args: list[object]
    seconds: float


def send(channel: socket.socket, message: object, buffers: Sequence[memoryview] = ()) -> None:
    """Send a message and its buffers. The channel's timeout applies to each part."""
    head = msgspec.msgpack.encode((message, [buffer.nbytes for buffer in buffers]))
    channel.sendall(_LENGTH.pack(len(head)) + head)
    for buffer in buffers:
        channel.sendall(buffer)


def receive(channel: socket.socket, deadline: float | None, most: int | None = None) -> tuple[msgspec.Raw, list[memoryview]]:
    """Receive a message and its buffers, before `deadline` on the monotonic clock.

    Raises:
        EOFError: the other side is gone, or announces more than `most` bytes.
        TimeoutError: the deadline passed.
    """
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    if most is not None and length > most:
        raise EOFError
    head = _read(channel, length, deadline)
    message, sizes = msgspec.msgpack.decode(head, type=tuple[msgspec.Raw, list[int]])
    if most is not None and sum(sizes) > most:
        raise EOFError
    return message.copy(), [_read(channel, size, deadline) for size in sizes]


def _read(channel: socket.socket, size: int, deadline: float | None) -> memoryview:
    view, done = memoryview(bytearray(size) if size < _MAPPED else mmap.mmap(-1, size)), 0
    while done < size:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-3))
        got = channel.recv_into(view[done:])
        if not got:
            raise EOFError
        done += got
    return view
