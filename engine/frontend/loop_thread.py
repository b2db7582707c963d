"""The thread of an EngineLoop. It holds a reference to the loop only while there is work."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any, Protocol

from ..core.client import CoreClient


class SteppedLoop(Protocol):
    """The part of an EngineLoop that its thread drives."""

    core: CoreClient
    closed: bool
    process: int

    @property
    def busy(self) -> bool: ...

    def turn(self, message: Any) -> None: ...

    def shut(self) -> None: ...

    def close(self) -> None: ...


_engine_loops: weakref.WeakSet[SteppedLoop] = weakref.WeakSet()


def start_loop(engine_loop: SteppedLoop, messages: SimpleQueue[Any], num_threads: int) -> threading.Thread:
    """Start the thread. It ends when the loop is closed or garbage collected; both put None into `messages`.

    Args:
        num_threads: number of torch's threads.
    """
    arguments = (weakref.ref(engine_loop), messages, num_threads)
    thread = threading.Thread(target=_run, args=arguments, name="sensorium-engine", daemon=True)
    thread.start()
    _engine_loops.add(engine_loop)
    return thread


def _run(ref: weakref.ref[SteppedLoop], messages: SimpleQueue[Any], num_threads: int) -> None:
    engine_loop = ref()
    if engine_loop is not None:
        engine_loop.core.bind_thread(num_threads)
    message = None
    while True:
        engine_loop = ref()
        if engine_loop is None or engine_loop.closed:
            break
        engine_loop.turn(message)
        message, busy = None, engine_loop.busy  # a closed loop is busy: `turn` may have consumed the None
        del engine_loop
        if not busy:
            message = messages.get()
    if engine_loop is not None:
        engine_loop.shut()


@atexit.register
def _close_all() -> None:
    """Close all loops at exit. A thread that still computes while the interpreter shuts down would crash the process."""
    for engine_loop in list(_engine_loops):
        if engine_loop.process == os.getpid():
            engine_loop.close()
