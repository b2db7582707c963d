"""Run codec functions in worker processes, which may crash without harm to the engine.

A worker serves one item at a time, so there are as many as there are concurrent calls; idle workers are reused, the most
recently used first. Messages are msgpack followed by tensors as raw bytes: nothing that comes back is ever executed.
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

START_SECONDS = 120.0  # time limit of a new worker's imports, on a busy machine
FOREVER = 365 * 86400.0  # seconds: system timers do not take infinity
_LENGTH = struct.Struct("<Q")
_INHERITED = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "PATH", "SYSTEMROOT", "TMPDIR")  # variables of the worker; no secrets
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
T = TypeVar("T")


class WorkerReply(msgspec.Struct):
    """Outcome of an item: "value", "input" (`text` is that of an InputError), "memory" or "bug" (`text` is a traceback).

    `stale`: the worker has leaked memory and should not be reused.
    """

    kind: str
    text: str = ""
    value: object = None
    stale: bool = False


class WorkerRequest(msgspec.Struct):
    """Call of `module.name(data, *args)`; `data` follows the message."""

    module: str
    name: str
    args: list[object]
    seconds: float
    memory: int


class CodecRunner(Protocol):
    """Calls a function with arguments, in this process or in a worker."""

    def __call__(self, function: Callable[..., T], data: Any, /, *args: object) -> T: ...


def codec_runner(policy: MediaPolicy, data: object, slow: bool = False) -> CodecRunner:
    """Return `run_isolated` for encoded bytes that are `slow` or if the policy isolates codecs, else `_run_inline`."""
    return run_isolated if (slow or policy.decode_isolation == "process") and isinstance(data, bytes) else _run_inline


def _run_inline(function: Callable[..., T], data: Any, /, *args: object) -> T:
    return function(data, *args)


def run_isolated(function: Callable[..., T], data: bytes, /, *args: object) -> T:
    """Run `function(data, *args)` in a worker, within the limits of the MediaPolicy among its arguments.

    The function must be a module's function with type hints. Arguments and result are numbers, strings, tensors, and
    dataclasses of these. `worker_memory_bytes` is address space for the item, on top of what an idle worker has with its
    libraries (0.9 GB). `worker_seconds` starts when `data` is sent; a worker's start (about a second) is not included.

    Raises:
        InputError: raised by the function, with the same text, or the function crashed, took too long or needed too much.
        RuntimeError: no worker can be started, or the function raised another error (a bug, with its traceback).
    """
    policy = next((arg for arg in args if isinstance(arg, MediaPolicy)), None)
    if policy is None:
        raise TypeError(f"{function.__name__} is called without a MediaPolicy")
    seconds, memory = min(float(policy.worker_seconds), FOREVER), int(min(policy.worker_memory_bytes, 1 << 62))
    request = WorkerRequest(function.__module__, function.__name__, list(args), seconds, memory)
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


def call_worker(function: Callable[[bytes], object], data: bytes, seconds: float, memory: int) -> WorkerReply:
    """Call a module's function in a worker and return its reply. Raise InputError if it crashed or took too long."""
    return _ask(WorkerRequest(function.__module__, function.__name__, [], seconds, memory), data)[0]


def close_workers() -> None:
    """Stop idle workers, and busy ones once they are done. A later call starts new ones."""
    global _closes
    with _lock:
        _closes += 1
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        worker.stop()


def keep_workers(owner: object) -> Callable[[], object]:
    """Keep idle workers until the returned function is called or `owner` is gone. They stop with the last owner."""
    global _owners
    with _lock:
        _owners += 1
    release = weakref.finalize(owner, _release, os.getpid())
    release.atexit = False
    return release


def _release(process: int) -> None:
    global _owners
    if process != os.getpid():  # a forked child counts its own owners
        return
    with _lock:
        _owners -= 1
        last = not _owners
    if last:
        close_workers()


class CodecWorker:
    """A worker process and the socket to it. Used by one thread at a time."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        # the import paths of this process, without the worker's current folder
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", str(theirs.fileno())]
        env = (
            {name: os.environ[name] for name in _INHERITED if name in os.environ}
            | dict.fromkeys(_THREADS, "1")
            | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}
        )
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

    def ask(self, request: WorkerRequest, data: bytes) -> tuple[WorkerReply, list[Tensor]]:
        """Return the reply and its tensors. TimeoutError if it is late, EOFError or OSError if the worker died."""
        deadline = time.monotonic() + request.seconds
        self._channel.settimeout(request.seconds)
        send(self._channel, request, [memoryview(data)])
        message, tensors = receive(self._channel, deadline, request.memory)
        return msgspec.msgpack.decode(message, type=WorkerReply), tensors

    def stop(self) -> int:
        """Kill the worker and return its exit status."""
        self._process.kill()
        self._channel.close()
        return self._process.wait()


_idle: list[CodecWorker] = []
_lock = threading.RLock()  # owners may be garbage collected, and so released, anywhere
_owners = _closes = 0


def _ask(request: WorkerRequest, data: bytes) -> tuple[WorkerReply, list[Tensor]]:
    began = _closes
    worker = _take()
    try:
        reply, tensors = worker.ask(request, data)
    except TimeoutError:
        worker.stop()
        raise InputError(_slow(request.seconds)) from None
    except (OSError, EOFError, msgspec.MsgspecError):
        status = worker.stop()
        if status == -signal.SIGALRM:  # the worker's own timer fired first
            raise InputError(_slow(request.seconds)) from None
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        raise InputError(f"decoding it crashed the codec ({name}); the file is broken or hostile") from None
    except BaseException:  # interrupted between request and reply: the next caller would get this reply
        worker.stop()
        raise
    with _lock:
        kept = not reply.stale and _closes == began
        if kept:
            _idle.append(worker)
    if not kept:
        worker.stop()
    return reply, tensors


def _take() -> CodecWorker:
    """Return an idle worker that is alive, or a new one."""
    while True:
        with _lock:
            worker = _idle.pop() if _idle else None
        if worker is None:
            return CodecWorker()
        if worker.alive:
            return worker
        worker.stop()


def _slow(seconds: float) -> str:
    return f"decoding it took longer than {seconds:g} s; give a shorter or smaller one, or raise worker_seconds"


def _shaped(tensors: list[Tensor], form: Any) -> Tensor:
    """Return the tensor that `form` refers to by number, with its dtype and shape."""
    typed: Tensor = tensors[form["at"]].view(getattr(torch, form["dtype"]))
    return typed.view(form["shape"])


def send(channel: socket.socket, message: object, buffers: Sequence[memoryview] = ()) -> None:
    """Send a message and its buffers. The channel's timeout applies to each part."""
    head = msgspec.msgpack.encode((message, [buffer.nbytes for buffer in buffers]))
    channel.sendall(_LENGTH.pack(len(head)) + head)
    for buffer in buffers:
        channel.sendall(buffer)


def receive(channel: socket.socket, deadline: float | None, most: int | None = None) -> tuple[msgspec.Raw, list[Tensor]]:
    """Receive a message and its buffers as uint8 `[bytes]`, before `deadline` on the monotonic clock.

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
    """Forget the parent's workers in a forked child."""
    global _lock, _owners
    _lock, _owners = threading.RLock(), 0
    _idle.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget)
