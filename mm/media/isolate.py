"""Runs one codec function in a worker process that may die without us. Knows no codec and no form of media.

A worker serves one item at a time, so as many start as threads call at once; idle ones are reused, last used first.
Messages are msgpack with the tensors behind them as raw bytes: nothing that comes back is ever executed.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from ..errors import InputError
from .policy import MediaPolicy

START_SECONDS = 120.0  # for the imports of a new worker, on a machine that has other things to do
FOREVER = 365 * 86400.0  # seconds: system clocks take no infinity
_LENGTH = struct.Struct("<Q")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
T = TypeVar("T")


class Reply(msgspec.Struct):
    """How an item went: "value", "input" (`text` is the InputError's), "memory" or "bug" (`text` is the traceback).

    `stale`: this worker has grown by what it lost hold of and should serve no other item.
    """

    kind: str
    text: str = ""
    value: object = None
    stale: bool = False


class Request(msgspec.Struct):
    """`module.name(data, *args)`; `data` follows the message."""

    module: str
    name: str
    args: list[object]
    seconds: float
    memory: int


class Run(Protocol):
    """Calls a function with its arguments, somewhere."""

    def __call__(self, function: Callable[..., T], data: Any, /, *args: object) -> T: ...


def caller(policy: MediaPolicy, data: object) -> Run:
    """What runs a codec's functions on `data`: encoded bytes go to a worker where the policy says so."""
    return isolated if policy.decode_isolation == "process" and isinstance(data, bytes) else _here


def _here(function: Callable[..., T], data: Any, /, *args: object) -> T:
    return function(data, *args)


def isolated(function: Callable[..., T], data: bytes, /, *args: object) -> T:
    """`function(data, *args)` in a worker, within the limits of the MediaPolicy among its arguments.

    The function is one of a module, with type hints: arguments and result are numbers, texts, tensors and dataclasses
    of these. `worker_memory_bytes` is address space for the item, on top of what an idle worker has with its libraries
    (0.9 GB); `worker_seconds` is counted from handing over `data`, a worker's start (about a second) not included.

    Raises:
        InputError: the function's own, with the same text, or that it crashed, took too long or needed too much.
        RuntimeError: no worker can be started, or the function raised something else (a bug, with its traceback).
    """
    policy = next((arg for arg in args if isinstance(arg, MediaPolicy)), None)
    if policy is None:
        raise TypeError(f"{function.__name__} is called without a MediaPolicy")
    seconds, memory = min(float(policy.worker_seconds), FOREVER), int(min(policy.worker_memory_bytes, 1 << 62))
    request = Request(function.__module__, function.__name__, list(args), seconds, memory)
    reply, tensors = _ask(request, data)
    if reply.kind == "value":
        hint = typing.get_type_hints(function)["return"]
        result: T = msgspec.convert(reply.value, hint, dec_hook=lambda _, form: _shaped(tensors, form))
        return result
    if reply.kind == "memory":
        raise InputError(
            f"decoding it needed more than {memory:,} bytes of memory; give a smaller one, or raise worker_memory_bytes"
        )
    if reply.kind == "input":
        raise InputError(reply.text)
    raise RuntimeError(f"{function.__name__} failed in the codec worker:\n{reply.text}")


def close() -> None:
    """Stop the idle workers, and those at work once they are done; a later call starts new ones."""
    global _closes
    with _lock:
        _closes += 1
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        worker.stop()


def kept_for(policy: MediaPolicy, owner: object) -> Callable[[], object]:
    """Keep idle workers while `owner` lives, or until what this returns is called: with the last owner they are stopped.

    Nothing is kept for an owner whose policy asks for no workers.
    """
    global _owners
    if policy.decode_isolation != "process":
        return lambda: None
    with _lock:
        _owners += 1
    release = weakref.finalize(owner, _release, os.getpid())
    release.atexit = False
    return release


def _release(process: int) -> None:
    global _owners
    if process != os.getpid():  # a forked child counts owners of its own
        return
    with _lock:
        _owners -= 1
        last = not _owners
    if last:
        close()


class Worker:
    """A started process and the socket to it; used by one thread at a time."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # it finds modules where we do, and not in its cwd
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", str(theirs.fileno())]
        env = os.environ | dict.fromkeys(_THREADS, "1") | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}
        with theirs:
            self._process = subprocess.Popen(
                command, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        try:
            receive(self._channel, time.monotonic() + START_SECONDS)
        except (OSError, EOFError):
            self.stop()
            raise RuntimeError(f"the codec worker did not start (exit status {self._process.returncode})") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Request, data: bytes) -> tuple[Reply, list[Tensor]]:
        """The reply and its tensors; TimeoutError when there is none in time, EOFError or OSError when it died."""
        deadline = time.monotonic() + request.seconds
        self._channel.settimeout(request.seconds)
        send(self._channel, request, [memoryview(data)])
        message, tensors = receive(self._channel, deadline, request.memory)
        return msgspec.msgpack.decode(message, type=Reply), tensors

    def stop(self) -> int:
        """Kill it; the exit status it had, or now has."""
        self._process.kill()
        self._channel.close()
        return self._process.wait()


_idle: list[Worker] = []
_lock = threading.RLock()  # an owner may be collected, and released, anywhere
_owners = _closes = 0


def _ask(request: Request, data: bytes) -> tuple[Reply, list[Tensor]]:
    began = _closes
    worker = _take()
    try:
        reply, tensors = worker.ask(request, data)
    except TimeoutError:
        worker.stop()
        raise InputError(_slow(request.seconds)) from None
    except (OSError, EOFError, msgspec.MsgspecError):
        status = worker.stop()
        if status == -signal.SIGALRM:  # its own clock was first
            raise InputError(_slow(request.seconds)) from None
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        raise InputError(f"decoding it crashed the codec ({name}); the file is broken or hostile") from None
    except BaseException:  # an interrupt between request and reply: the next caller would get our reply
        worker.stop()
        raise
    with _lock:
        kept = not reply.stale and _closes == began
        if kept:
            _idle.append(worker)
    if not kept:
        worker.stop()
    return reply, tensors


def _take() -> Worker:
    """An idle worker that lives, else a new one."""
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return Worker()
        if worker.alive:
            return worker
        worker.stop()


def _slow(seconds: float) -> str:
    return f"decoding it took longer than {seconds:g} s; give a shorter or smaller one, or raise worker_seconds"


def _shaped(tensors: list[Tensor], form: Any) -> Tensor:
    """The tensor whose bytes are number `at`."""
    typed: Tensor = tensors[form["at"]].view(getattr(torch, form["dtype"]))
    return typed.view(form["shape"])


def send(channel: socket.socket, message: object, buffers: Sequence[memoryview] = ()) -> None:
    """One message and the buffers that belong to it; the channel's timeout is that of each part."""
    head = msgspec.msgpack.encode((message, [buffer.nbytes for buffer in buffers]))
    channel.sendall(_LENGTH.pack(len(head)) + head)
    for buffer in buffers:
        channel.sendall(buffer)


def receive(channel: socket.socket, deadline: float | None, most: int | None = None) -> tuple[msgspec.Raw, list[Tensor]]:
    """The next message and its buffers as uint8 `[bytes]`, before `deadline` on the monotonic clock.

    Raises:
        EOFError: the other side is gone, or announces more than `most` bytes.
        TimeoutError: the deadline passed.
    """
    (length,) = _LENGTH.unpack(bytes(_read(channel, _LENGTH.size, deadline).numpy()))
    if most is not None and length > most:
        raise EOFError
    head = _read(channel, length, deadline).numpy().data
    message, sizes = msgspec.msgpack.decode(head, type=tuple[msgspec.Raw, list[int]])
    if most is not None and sum(sizes) > most:
        raise EOFError
    return message.copy(), [_read(channel, size, deadline) for size in sizes]


def _read(channel: socket.socket, size: int, deadline: float | None) -> Tensor:
    out = torch.empty(size, dtype=torch.uint8)
    view, done = out.numpy().data, 0
    while done < size:
        channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        got = channel.recv_into(view[done:])
        if not got:
            raise EOFError
        done += got
    return out


def _forget() -> None:
    """A forked child shares no worker with its parent."""
    global _lock, _owners
    _lock, _owners = threading.RLock(), 0
    _idle.clear()


atexit.register(close)
os.register_at_fork(after_in_child=_forget)
