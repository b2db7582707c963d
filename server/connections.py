"""Limits on connections: their number, and the time until a request's header is complete."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import ServerConfig

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def connection_class(limits: ServerConfig) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol of HTTP/1.1 with limits on connections."""

    class Connection(H11Protocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.write(_FULL)
                transport.close()
            else:
                self._limit_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit_header()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(error)

        def _limit_header(self) -> None:
            """Start the timer at the first byte after a response, and stop it while a request is in progress.

            A response may be complete before its request's body has arrived: the timer then limits the rest of the body.
            """
            in_progress = self.cycle is not None and not self.cycle.response_complete
            if in_progress or self.transport.is_closing() or self.transport.get_protocol() is not self:  # a WebSocket
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.header_seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection
