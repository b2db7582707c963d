"""Checks around a request's endpoint: key, size and time of the body, number of requests, clients that do not read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from typing import Any

from starlette.exceptions import HTTPException

from .config import ServerConfig
from .errors import HttpError, error_response

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
TENANT = "sensorium.tenant"
"""Key of a scope: a text that stands for the request's API key in cache salts, or None without keys."""
MAX_VALUES = 1 << 20
"""Most commas and opening brackets of a JSON body: the event loop parses it, and 256 MiB of `[],[],` take many seconds."""
_OPEN = ("/health", "/ready")  # for load balancers, which have no key


class Guard:
    """ASGI middleware that refuses a request before its body is read, or while it is read, and clients that do not read."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self.config = app, config
        self._digests = [sha256(key.encode("utf-8", "surrogatepass")).digest() for key in config.keys]
        self._in_progress = 0
        self.body_bytes = 0  # of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        config = self.config
        try:
            headers = dict(scope["headers"])
            scope[TENANT] = None if scope["path"] in _OPEN else self._tenant(headers)
            self._check_length(headers.get(b"content-length", b"0"))
            if scope["method"] == "POST" and self._in_progress >= config.max_requests:
                reason = f"the server has {config.max_requests} requests in progress (max_requests); try again later"
                raise HttpError(429, reason, "overloaded")
        except HttpError as error:
            await error_response(error)(scope, receive, send)
            return

        async def limited_send(message: MutableMapping[str, Any]) -> None:
            async with asyncio.timeout(config.send_seconds):
                await send(message)

        is_form = headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        body = _Body(self, receive, is_form)
        self._in_progress += scope["method"] == "POST"
        try:
            await self._app(scope, body.receive, limited_send)
        finally:
            self._in_progress -= scope["method"] == "POST"
            self.body_bytes -= body.size

    def _tenant(self, headers: dict[bytes, bytes]) -> str | None:
        """Check the key in constant time, and return its tenant."""
        if not self._digests:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise HttpError(
                401, "the API key is missing or wrong; give the header Authorization: Bearer KEY", "invalid_api_key"
            )
        return sha256(b"tenant:" + digest).hexdigest()

    def _check_length(self, length: bytes) -> None:
        if not length.isdigit() or len(length) > 20:
            raise _too_large(self.config.max_body_bytes)
        self.check_size(int(length), int(length))

    def check_size(self, size: int, further: int) -> None:
        """Raise HttpError if a body of this size, of which `further` bytes are not counted yet, is too large."""
        if size > self.config.max_body_bytes:
            raise _too_large(self.config.max_body_bytes)
        if self.body_bytes + further > self.config.max_total_body_bytes:
            limit = self.config.max_total_body_bytes
            reason = (
                f"the bodies of the requests in progress are larger than {limit} bytes (max_total_body_bytes); try again later"
            )
            raise HttpError(429, reason, "overloaded")


class _Body:
    """Receives one request's body within the limits on its size, time and values."""

    def __init__(self, guard: Guard, receive: Receive, is_form: bool) -> None:
        self._guard, self._receive, self._is_form = guard, receive, is_form
        self._end = asyncio.get_running_loop().time() + guard.config.body_seconds
        self.size = self._values = 0
        self._complete = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            seconds = self._guard.config.body_seconds
            reason = f"the body did not arrive within {seconds:g} s (body_seconds); send it again"
            raise HTTPException(408, reason) from None
        block = message.get("body", b"")
        self._complete = not message.get("more_body", False)
        try:
            self._guard.check_size(self.size + len(block), len(block))
        except HttpError as error:  # FastAPI passes no other class on
            raise HTTPException(error.status, error.message) from None
        self.size += len(block)
        self._guard.body_bytes += len(block)
        self._values += 0 if self._is_form else sum(map(block.count, (b",", b"[", b"{")))
        if self._values > MAX_VALUES:
            reason = f"the body has more than {MAX_VALUES} values (commas and opening brackets); send fewer at once"
            raise HTTPException(413, reason)
        return message


def _too_large(limit: int) -> HttpError:
    reason = f"the body is larger than {limit} bytes (max_body_bytes); send a smaller one"
    return HttpError(413, reason, "body_too_large")
