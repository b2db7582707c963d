"""A thread for work on outputs that the step loop must not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from .request_handle import RequestHandle, drop_command, notify
from .trace import Observer

_log = logging.getLogger(__name__)
_Work = tuple[Sequence[RequestHandle], Sequence[RequestHandle]]


class OutputThread:
    """Finds stop strings, keeps inboxes short, and calls observers. The thread starts with the first `put`.

    Args:
        observers: called with each finished request, before its caller is notified.
        commands: as in `RequestHandle.register`.
    """

    def __init__(self, observers: list[Observer], commands: SimpleQueue[Any]) -> None:
        self.observers, self._commands = observers, commands
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, unread: Sequence[RequestHandle], finished: Sequence[RequestHandle] = ()) -> None:
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
    for handle in finished:
        handle.read()
        for observe in observers:
            try:
                observe(handle.builder.summary(), handle.times)
            except Exception:
                _log.exception("an observer of requests failed")
    for handle in notify(finished):
        commands.put(drop_command(handle))
