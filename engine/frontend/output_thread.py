"""A thread for work on outputs that the step loop must not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from .request import Answer
from .request_handle import Drop, Message, RequestHandle, notify
from .trace import Observer

_log = logging.getLogger(__name__)
Finished = tuple[RequestHandle, Answer]
"""A finished answer. A live session may begin its next turn, with another answer, before it is observed."""
_Work = tuple[Sequence[RequestHandle], Sequence[Finished]]


class OutputThread:
    """Finds stop strings, keeps inboxes short, and calls observers. The thread starts with the first `put`.

    Args:
        observers: called once with each finished answer.
        messages: as in `RequestHandle.register`.
    """

    def __init__(self, observers: list[Observer], messages: SimpleQueue[Message | None]) -> None:
        self.observers, self._messages = observers, messages
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, unread: Sequence[RequestHandle], finished: Sequence[Finished] = ()) -> None:
        """Read inboxes; call the observers of finished requests, and notify their callers."""
        if self._thread is None:
            arguments = (self._queue, self.observers, self._messages)
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


def _work(queue: SimpleQueue[_Work | None], observers: list[Observer], messages: SimpleQueue[Message | None]) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        try:
            _do(work, observers, messages)
        except Exception:
            _log.exception("work on outputs failed")
        del work  # keep no request alive while waiting


def _do(work: _Work, observers: list[Observer], messages: SimpleQueue[Message | None]) -> None:
    unread, finished = work
    for handle in unread:
        handle.read()
    for handle, answer in finished:
        handle.read()
        for observe in observers:
            try:
                observe(answer.builder.summary(), answer.times)
            except Exception:
                _log.exception("an observer of requests failed")
    for handle in notify([handle for handle, _ in finished]):
        messages.put(Drop((handle,)))
