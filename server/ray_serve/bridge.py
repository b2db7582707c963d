"""Runs an ASGI application on requests that come as one message, and yields the response in parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..guard import App, Scope

MAX_UNREAD_BYTES = 1 << 20
"""Bytes of a response that wait for their reader; the application's next `send` waits until there are fewer."""
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


class _Messages:
    """The messages of a response, first in, first out. `send` waits while `MAX_UNREAD_BYTES` or more are unread."""

    def __init__(self) -> None:
        self._waiting: deque[MutableMapping[str, Any] | None] = deque()
        self._unread, self._changed, self._is_closed = 0, asyncio.Event(), False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._is_closed:
            return
        self._put(message)
        while self._unread >= MAX_UNREAD_BYTES and not self._is_closed:
            await self._wait()

    def close(self) -> None:
        """Drop what is unread and what is still sent: the reader has gone."""
        self._is_closed = True
        self._waiting.clear()
        self._changed.set()

    def end(self) -> None:
        self._put(None)

    async def get(self) -> MutableMapping[str, Any] | None:
        """Return the next message, or None after the last one."""
        while not self._waiting:
            await self._wait()
        message = self._waiting.popleft()
        self._unread -= _size(message)
        self._changed.set()
        return message

    def _put(self, message: MutableMapping[str, Any] | None) -> None:
        self._waiting.append(message)
        self._unread += _size(message)
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _size(message: MutableMapping[str, Any] | None) -> int:
    return 0 if message is None else len(message.get("body", b""))


async def run_app(app: App, scope: Scope, body: bytes) -> AsyncGenerator[Start | bytes, None]:
    """Yield the start of a request's response, then its bytes as they come. Closing the generator disconnects the client.

    If the bytes are not taken, the application waits as it does for a client that reads slowly.
    """
    messages = _Messages()
    left, is_read = asyncio.Event(), False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            await left.wait()
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    task = asyncio.ensure_future(app({**scope}, receive, messages.send))
    task.add_done_callback(lambda _: messages.end())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Start(message["status"], [*message.get("headers", ())])
            elif block := message.get("body", b""):
                yield bytes(block)
        task.result()
    finally:
        left.set()
        messages.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
