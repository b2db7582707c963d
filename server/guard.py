"""Checks before a request's endpoint: key, size and time of the body, number of requests."""

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
_OPEN = ("/health", "/ready")  # for load balancers, which have no key


class Guard:
    """ASGI middleware that refuses a request before its body is read, or while it is read."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._digests = [sha256(key.encode("utf-8", "surrogatepass")).digest() for key in config.keys]
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            scope[TENANT] = None if scope["path"] in _OPEN else self._tenant(headers)
            self._check_length(headers.get(b"content-length", b"0"))
            if scope["method"] == "POST" and self._in_progress >= self._config.max_requests:
                reason = f"the server has {self._config.max_requests} requests in progress (max_requests); try again later"
                raise HttpError(429, reason, "overloaded")
        except HttpError as error:
            await error_response(error)(scope, receive, send)
            return
        self._in_progress += scope["method"] == "POST"
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._in_progress -= scope["method"] == "POST"

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
        if not length.isdigit() or len(length) > 20 or int(length) > self._config.max_body_bytes:
            reason = f"the body is larger than {self._config.max_body_bytes} bytes (max_body_bytes); send a smaller one"
            raise HttpError(413, reason, "body_too_large")

    def _limited(self, receive: Receive) -> Receive:
        """Return `receive` with the limits on the size and the time of the body."""
        limit, seconds = self._config.max_body_bytes, self._config.body_seconds
        end = asyncio.get_running_loop().time() + seconds
        size, complete = 0, False

        async def limited() -> MutableMapping[str, Any]:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body did not arrive within {seconds:g} s (body_seconds); send it again"
                ) from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes (max_body_bytes); send a smaller one")
            return message

        return limited
