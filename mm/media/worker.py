"""The process codecs run in when they are isolated: `python -m sensorium.mm.media.worker <socket>`. Knows no form of media."""

from __future__ import annotations

import contextlib
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
from .isolate import Reply, Request, receive, send

LIBRARIES = ("PIL.Image", "av", "cv2", "soundfile", "soxr")  # before the limit is set, so that no item pays for them
LEAK = 512 << 20  # bytes of address space a worker may keep of the items it has served
GRACE = 1.0  # seconds after which an item's process ends by itself: for those whose parent is gone


def main() -> None:
    """Serve items until the socket's other end is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it stops us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # the function that needs it says so
            import_module(name)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # codecs complain of hostile files there, line by line
    at_start = address_space()
    with contextlib.suppress(EOFError, ConnectionError):
        send(channel, None)
        while True:
            message, buffers = receive(channel, None)
            request = msgspec.msgpack.decode(message, type=Request)
            reply, tensors = serve(request, bytes(buffers.pop().numpy().data))
            reply.stale = address_space() > at_start + LEAK
            send(channel, reply, [t.reshape(-1).view(torch.uint8).numpy().data for t in tensors])


def serve(request: Request, data: bytes) -> tuple[Reply, list[Tensor]]:
    """The reply and the tensors its value refers to by number, computed within the request's limits."""
    tensors: list[Tensor] = []

    def set_aside(value: object) -> object:
        if not isinstance(value, Tensor):
            raise TypeError(f"{typed(value)} cannot leave the worker")  # a codec's bug: `isolated` lists what may
        tensors.append(value.contiguous())
        return {"at": len(tensors) - 1, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_lower(address_space() + request.memory, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, request.seconds + GRACE)
    try:
        result = msgspec.to_builtins(_run(request, data), enc_hook=set_aside)
        return Reply("value", value=result), tensors
    except Exception as error:  # the boundary: whatever it is goes to the caller, who raises it there
        if _out_of_memory(error):
            return Reply("memory"), []
        if isinstance(error, InputError):
            return Reply("input", str(error)), []
        return Reply("bug", traceback.format_exc()), []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def address_space() -> int:
    """Bytes of it that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _run(request: Request, data: bytes) -> object:
    function = getattr(import_module(request.module), request.name)
    hints = [p.annotation for p in inspect.signature(function, eval_str=True).parameters.values()]
    return function(data, *map(msgspec.convert, request.args, hints[1:]))


def _lower(wanted: int, hard: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _out_of_memory(error: BaseException | None) -> bool:
    """True where an allocation failed, also one that the codec's boundary has already put into words of its own."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate", "out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
