"""Unknown fields of requests, which an option leaves out instead of refusing the request."""

from __future__ import annotations

from typing import Any

from .protocol.body import on_unknown_field


class UnknownFields:
    """ASGI middleware that counts the unknown fields of bodies, which are left out.

    Args:
        registry: the CollectorRegistry for the counter, or None.
    """

    def __init__(self, app: Any, registry: Any = None) -> None:
        self._app = app
        self._count = _ignore if registry is None else _counter(registry).inc

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        token = on_unknown_field.set(self._count)
        try:
            await self._app(scope, receive, send)
        finally:
            on_unknown_field.reset(token)


def _ignore(count: int) -> None:
    pass


def _counter(registry: Any) -> Any:
    from prometheus_client import Counter

    return Counter("sensorium_unknown_fields", "unknown fields of requests, which were left out", registry=registry)
