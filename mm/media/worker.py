"""Worker process of isolated codecs: `python -m sensorium.mm.media.worker <module>`, with a socket as its standard input."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import sys
import traceback
from importlib import import_module

import msgspec

from ...callers.errors import InputError, typed
from .sandbox import cut_off
from .worker_messages import WorkerReply, WorkerRequest, receive, send

_ENCODINGS = ("zlib", "encodings.cp437", "encodings.utf_16", "encodings.latin_1", "encodings.cp1252", "encodings.iso8859_15")
GRACE = 1.0  # seconds after the time limit at which the worker kills itself, in case its parent is gone


def main() -> None:
    """Serve items until the other end of the socket is closed. All modules are imported before the process is cut off."""
    channel = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which stops this process
    os.nice(5)  # the engine's steps come first
    names = getattr(import_module(sys.argv[1]), "WORKER_IMPORTS", None)
    for name in _codecs() if names is None else names:
        with contextlib.suppress(ImportError):  # reported by the function that needs it
            import_module(name)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # codecs print warnings of broken files there
    problem = cut_off()
    with contextlib.suppress(EOFError, ConnectionError):
        send(channel, problem)
        while True:
            message, buffers = receive(channel, None)
            request = msgspec.msgpack.decode(message, type=WorkerRequest)
            send(channel, *serve(request, bytes(buffers.pop())))


def _codecs() -> list[str]:
    """Prepare torch and return the modules of codecs."""
    import torch

    from . import gate
    from .policy import MediaPolicy

    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # quiet: what it cannot read, we say
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability()  # reads /proc/cpuinfo once
    policy = MediaPolicy(video_backend="opencv")
    codecs = (name for kind in ("image", "video", "audio") for name in gate.modules(kind, policy))
    modules = [f"{__package__}.{name}" for name in ("page_facts", "line_pictures", "page_picture", "text_overlay")]
    return [*modules, *_ENCODINGS, "pypdfium2", "pillow_heif", *codecs]


def serve(request: WorkerRequest, data: bytes) -> tuple[WorkerReply, list[memoryview]]:
    """Run the request within its time. Returns the reply, and the bytes of tensors that its value refers to by number."""
    buffers: list[memoryview] = []

    def set_aside(value: object) -> object:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            raise TypeError(f"{typed(value)} cannot leave the worker")  # a bug: `run_isolated` lists the types that can
        buffers.append(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return {"at": len(buffers) - 1, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    signal.setitimer(signal.ITIMER_REAL, request.seconds + GRACE)
    try:
        result = msgspec.to_builtins(_run(request, data), enc_hook=set_aside)
        return WorkerReply("value", value=result), buffers
    except Exception as error:  # any error goes to the caller, which raises it there
        if _out_of_memory(error):
            return WorkerReply("memory"), []
        if isinstance(error, InputError):
            return WorkerReply("input", value=error.info.fields()), []
        return WorkerReply("bug", traceback.format_exc()), []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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
