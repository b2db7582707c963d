"""A thread for work on outputs that the step loop must not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from .output_processor import OutputBuilder
from .request_handle import RequestHandle, drop_command, notify
from .trace import Observer, RequestTimes

_log = logging.getLogger(__name__)
Finished = tuple[RequestHandle, OutputBuilder, RequestTimes]
"""A finished answer. A live session may begin its next turn, with another builder and other times, before it is observed."""
_Work = tuple[Sequence[RequestHandle], Sequence[Finished]]


class OutputThread:
    """Finds stop strings, keeps inboxes short, and calls observers. The thread starts with the first `put`.

    Args:
        observers: called once with each finished answer.
        commands: as in `RequestHandle.register`.
    """

    def __init__(self, observers: list[Observer], commands: SimpleQueue[Any]) -> None:
        self.observers, self._commands = observers, commands
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, unread: Sequence[RequestHandle], finished: Sequence[Finished] = ()) -> None:
        """Read inboxes; call the observers of finished requests, and notify their callers."""
        if self._thread is None:
            arguments = (self._queue, self.observers, self._commands)
            self._thread = threading.Thread(target=_work, args=arguments, name="sensorium-output", daemon=True)
            self._thread.start()
        self._queue.put((unread, finished))

    def stop(self) -> None:
        """End the thread after its remaining work, without waiting for it."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _work(queue: SimpleQueue[_Work | None], observers: list[Observer], commands: SimpleQueue[Any]) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        try:
            _do(work, observers, commands)
        except Exception:
            _log.exception("work on outputs failed")
        del work  # keep no request alive while waiting


def _do(work: _Work, observers: list[Observer], commands: SimpleQueue[Any]) -> None:
    unread, finished = work
    for handle in unread:
        handle.read()
    for handle, builder, times in finished:
        handle.read()
        for observe in observers:
            try:
                observe(builder.summary(), times)
            except Exception:
                _log.exception("an observer of requests failed")
    for handle in notify([handle for handle, _, _ in finished]):
        commands.put(drop_command(handle))
