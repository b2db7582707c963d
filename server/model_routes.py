"""Gives each request the model that it names, if a server has several."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

from fastapi import Request, WebSocket
from fastapi.responses import Response
from starlette.requests import HTTPConnection

from .errors import HttpError
from .guard import App, Receive, Scope, Send
from .protocol.ollama import LATEST
from .request_record import current_record
from .state import LEASE, services_of, unless_disconnected
from .streams import open_late

_READY = "sensorium.ready"
"""Key of a scope: what leases the request's model."""


async def with_model(request: Request, name: str | None, streams: bool, respond: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of `respond`, which `server_of` gives the model of this name. It is loaded before if need be.

    Args:
        streams: the response is a stream of events, and comments are sent while it waits.

    Raises:
        HttpError: see `ModelPool.acquire`.
    """
    if streams and not (services_of(request).pool.is_fixed or LEASE in request.scope):
        return await open_late(request, _begin_lease(request, name), respond)
    await lease_model(request, name)
    return await respond()


async def lease_model(request: Request | WebSocket, name: str | None) -> None:
    """Let `server_of` return the model of this name until the response's or session's end. It is loaded before if need be."""
    if not (services_of(request).pool.is_fixed or LEASE in request.scope):
        await unless_disconnected(request, _begin_lease(request, name))


def _begin_lease(request: HTTPConnection, name: str | None) -> asyncio.Future[None]:
    ready = request.scope[_READY] = asyncio.ensure_future(_lease(request, name))
    return ready


async def _lease(request: HTTPConnection, name: str | None) -> None:
    """Lease a model until the response's end.

    The scope keeps the lease, not the caller, who may be cancelled after the model is leased and before it gets a result.
    """
    lease = await services_of(request).pool.acquire(name)
    request.scope[LEASE] = lease
    if (record := current_record.get()) is not None:
        record.model = lease.model.name
    if request.scope["type"] == "http" and lease.model.engine.media_full:
        reason = "the media of the requests in progress are larger than max_total_bytes; try again later"
        raise HttpError(429, reason, "overloaded")


def on_model(path: str, endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Return an endpoint that waits for the model that its body names."""

    @wraps(endpoint)
    async def call(body: Any, request: Request) -> Response:
        name, is_ollama = body.model, path.startswith("/api/")
        streams = bool(getattr(body, "stream", None)) and not is_ollama
        name = name.removesuffix(LATEST) if is_ollama else name
        return await with_model(request, name, streams, partial(endpoint, body, request))

    call.__signature__ = inspect.signature(endpoint, eval_str=True)  # type: ignore[attr-defined]
    return call


class ReleaseModels:
    """ASGI middleware that ends the lease of a request's model when its response has ended."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if (ready := scope.get(_READY)) is not None:
                ready.cancel()  # of a response that was not begun
            if (lease := scope.get(LEASE)) is not None:
                lease.release()
