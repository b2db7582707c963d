"""Runs an ASGI application on requests that come as one message, and yields the response in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..guard import App, Scope

_KEPT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


@dataclass(frozen=True)
class Start:
    """The status and headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]


def message_of(scope: Scope) -> dict[str, Any]:
    """Return the parts of a request's scope that another process needs."""
    addresses = {name: scope.get(name) and tuple(scope[name]) for name in ("client", "server")}
    return {name: scope[name] for name in _KEPT if name in scope} | addresses


async def run_app(app: App, scope: Scope, body: bytes) -> AsyncGenerator[Start | bytes, None]:
    """Yield the start of a request's response, then its bytes as they come. Closing the generator disconnects the client."""
    messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
    left, is_read = asyncio.Event(), False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            await left.wait()
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    task = asyncio.ensure_future(app({**scope}, receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Start(message["status"], [*message.get("headers", ())])
            elif block := message.get("body", b""):
                yield bytes(block)
        task.result()
    finally:
        left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
