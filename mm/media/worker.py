"""Worker process of isolated codecs: `python -m sensorium.mm.media.worker <socket>`."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import resource
import signal
import socket
import sys
import traceback
from importlib import import_module

import msgspec
import torch
from torch import Tensor

from ..errors import InputError, typed
from .isolate import WorkerReply, WorkerRequest, receive, send

LIBRARIES = ("PIL.Image", "av", "cv2", "soundfile", "soxr")  # imported before the memory limit is set, not charged to items
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
LEAK = 512 << 20  # bytes of address space that a worker may keep after its items
GRACE = 1.0  # seconds after the time limit at which the worker kills itself, in case its parent is gone


def main() -> None:
    """Serve items until the other end of the socket is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which stops this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # on Linux: no setuid program gives it more rights
    torch.set_num_threads(1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # reported by the function that needs it
            import_module(name)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # codecs print warnings of broken files there
    at_start = address_space()
    with contextlib.suppress(EOFError, ConnectionError):
        send(channel, None)
        while True:
            message, buffers = receive(channel, None)
            request = msgspec.msgpack.decode(message, type=WorkerRequest)
            reply, tensors = serve(request, bytes(buffers.pop().numpy().data))
            reply.stale = address_space() > at_start + LEAK
            send(channel, reply, [t.reshape(-1).view(torch.uint8).numpy().data for t in tensors])


def serve(request: WorkerRequest, data: bytes) -> tuple[WorkerReply, list[Tensor]]:
    """Run the request within its limits. Returns the reply, and the tensors that its value refers to by number."""
    tensors: list[Tensor] = []

    def set_aside(value: object) -> object:
        if not isinstance(value, Tensor):
            raise TypeError(f"{typed(value)} cannot leave the worker")  # a bug: `run_isolated` lists the types that can
        tensors.append(value.contiguous())
        return {"at": len(tensors) - 1, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = address_space() + request.memory
    lower = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    signal.setitimer(signal.ITIMER_REAL, request.seconds + GRACE)
    try:
        result = msgspec.to_builtins(_run(request, data), enc_hook=set_aside)
        return WorkerReply("value", value=result), tensors
    except Exception as error:  # any error goes to the caller, which raises it there
        if _out_of_memory(error):
            return WorkerReply("memory"), []
        if isinstance(error, InputError):
            return WorkerReply("input", str(error)), []
        return WorkerReply("bug", traceback.format_exc()), []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def address_space() -> int:
    """Return the bytes of address space that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _run(request: WorkerRequest, data: bytes) -> object:
    function = getattr(import_module(request.module), request.name)
    hints = [p.annotation for p in inspect.signature(function, eval_str=True).parameters.values()]
    return function(data, *map(msgspec.convert, request.args, hints[1:]))


def _out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed, also if the codec has already turned it into another error."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate", "out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
