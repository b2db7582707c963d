"""Limits on connections: their number, and the time until a request's header is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import ServerConfig
from .errors import HttpError, error_response
from .guard import CONNECTION, has_two_lengths

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LimitedConnection(H11Protocol):  # type: ignore[misc]
    """uvicorn's protocol of HTTP/1.1 with limits.

    `on_malformed` is called for what is not HTTP.
    """

    limits: ServerConfig
    on_malformed: Callable[[], object]
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._limit_header()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is None:
            return
        scope: Any = self.cycle.scope
        scope[CONNECTION] = self
        if has_two_lengths(scope["headers"]):
            self.cycle.keep_alive = False  # a proxy may have read other bytes as the next request

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_header()

    @property
    def unsent(self) -> int:
        return int(self.transport.get_write_buffer_size())

    async def drain(self) -> None:
        await self.flow.drain()

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with an error object, and close the connection."""
        self.on_malformed()
        reason = "the request is not valid HTTP/1.1; send it again with a correct header and body"
        response = error_response(HttpError(400, reason, "invalid_http"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _limit_header(self) -> None:
        """Start the timer at the first byte after a response, and stop it while a request is in progress.

        A response may be complete before its request's body has arrived: the timer then limits the rest of the body.
        """
        in_progress = self.cycle is not None and not self.cycle.response_complete
        if in_progress or self.transport.is_closing() or self.transport.get_protocol() is not self:  # a WebSocket
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(limits: ServerConfig, on_malformed: Callable[[], object] = lambda: None) -> type[LimitedConnection]:
    """Return the class for uvicorn's option `http`."""
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits, "on_malformed": staticmethod(on_malformed)})
