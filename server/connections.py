"""Limits on connections, and answers to bytes that never become a request for the application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import ServerConfig
from .errors import HttpError, error_response
from .guard import CONNECTION, has_two_lengths


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
            reason = f"the server has {self.limits.max_connections} open connections (max_connections); try again later"
            self._refuse(HttpError(503, reason, "overloaded"))
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

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if _is_handshake(event):
            super().handle_websocket_upgrade(event)
        else:  # uvicorn would answer in plain text
            self.on_malformed()
            reason = "the request is no valid handshake of a WebSocket (RFC 6455); send it again with a correct header"
            self._refuse(HttpError(400, reason, "invalid_http"))

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with an error object, and close the connection."""
        self.on_malformed()
        reason = "the request is not valid HTTP/1.1; send it again with a correct header and body"
        self._refuse(HttpError(400, reason, "invalid_http"))

    def _refuse(self, error: HttpError) -> None:
        """Answer with an error object before there is a request for the application, and close the connection."""
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase),
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


def _is_handshake(event: h11.Request) -> bool:
    from websockets.datastructures import Headers
    from websockets.http11 import Request
    from websockets.server import ServerProtocol

    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers)
    answer = ServerProtocol().accept(Request(event.target.decode("latin-1"), headers))
    return event.method == b"GET" and answer.status_code == 101


def connection_class(limits: ServerConfig, on_malformed: Callable[[], object] = lambda: None) -> type[LimitedConnection]:
    """Return the class for uvicorn's option `http`."""
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits, "on_malformed": staticmethod(on_malformed)})
