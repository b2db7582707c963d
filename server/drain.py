"""Ends the requests that are still in progress at the time limit of a shutdown, each with an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

from .error_shapes import in_shape_of
from .errors import HttpError, error_response
from .events import error_chunk
from .guard import TENANT, App, Receive, Scope, Send
from .request_record import note_error

_log = logging.getLogger(__name__)


class Drain:
    """ASGI middleware that cancels the requests in progress at the time limit and tells their clients so.

    A plain request gets the status 503 with an error object, a stream an event or a line with it.
    """

    def __init__(self, app: App, drain: Draining) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or TENANT in scope:  # TENANT: a line of a batch, which runs again after the next start
            await self._app(scope, receive, send)
            return
        started: MutableMapping[str, Any] | None = None
        complete = False

        async def noting_send(message: MutableMapping[str, Any]) -> None:
            nonlocal started, complete
            started = message if message["type"] == "http.response.start" else started
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._drain.tasks.add(task)
        try:
            await self._app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if not self._drain.has_expired or complete:
                raise
            if started is None:
                await in_shape_of(scope, error_response(_ended()))(scope, receive, send)
            elif (chunk := error_chunk(scope, _content_type(started), _ended())) is not None:
                note_error()
                await send({"type": "http.response.body", "body": chunk, "more_body": False})
            else:
                raise
        finally:
            self._drain.tasks.discard(task)


class Draining:
    """The requests in progress, and whether the time limit of the shutdown is over."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.has_expired = False

    def expire(self) -> None:
        """Cancel the requests in progress."""
        self.has_expired = True
        if self.tasks:
            _log.warning("the time limit of the shutdown (drain_seconds) ends requests in progress: %d", len(self.tasks))
        for task in self.tasks:
            task.cancel()


def _ended() -> HttpError:
    reason = "the server shuts down and could not finish this request in time (drain_seconds); send it again later"
    return HttpError(503, reason, "shutting_down")


def _content_type(start: MutableMapping[str, Any]) -> str:
    return next((value.decode("latin-1") for name, value in start["headers"] if name.lower() == b"content-type"), "")
