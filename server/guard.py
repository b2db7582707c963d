"""Checks around an endpoint: host, origin, key, size and time of the body, number of requests, clients that do not read."""

from __future__ import annotations

import asyncio
import hmac
import re
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException

from ..callers.errors import short_repr
from .config import ServerConfig, is_loopback
from .endpoints.page import PAGE_FILES, SAMPLE_FILES
from .error_shapes import in_shape_of
from .errors import HttpError, error_response
from .openapi import FORMS
from .request_record import current_record

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
TENANT = "sensorium.tenant"
"""Key of a scope: a text that stands for the request's API key in cache salts, or None without keys."""
PRIORITY = "sensorium.priority"
"""Key of a scope: the request's priority in the engine. The smallest is served first; requests from clients have 0."""
HELD_BYTES = "sensorium.held_bytes"
"""Key of a scope: bytes of the request's body and of the uploaded files that it has loaded; of a line of a batch, of the files
alone. They count until its end. Code that keeps them longer sets this to 0 and subtracts them later."""
CONNECTION = "sensorium.connection"
"""Key of a scope: the request's Connection. Only requests over the server's own connections have it."""
MAX_VALUES = 1 << 20
"""Most commas and opening brackets of a JSON body: parsing 256 MiB of `[],[],` takes many seconds."""
_KEY_PROTOCOL, _BASE64_PROTOCOL = "openai-insecure-api-key.", "sensorium-api-key-base64url."
_SINGLE = (b"host", b"origin", b"authorization", b"x-api-key", b"content-length")
"""Headers that no request may have twice, because a proxy could read the first one and the server the last one."""
_CANCEL = re.compile(r"/v1/(responses|batches)/[^/]+/cancel")
_OPEN = {"/health", "/ready", "/ping", *PAGE_FILES, *SAMPLE_FILES}  # for load balancers and the page, which have no key


class Connection(Protocol):
    """What the checks need of a connection."""

    @property
    def unsent(self) -> int:
        """Bytes of responses that the client has not taken yet."""

    async def drain(self) -> None:
        """Wait until few bytes are unsent."""

    def abort(self) -> None:
        """Close the connection at once."""


@dataclass
class BodyBytes:
    """Bytes of the bodies of all requests and responses in the background in progress, and of the held lines of batches."""

    count: int = 0


class Guard:
    """ASGI middleware that refuses a request before its body is read, or while it is read, and clients that do not read.

    Args:
        is_full: True while the engine takes no more media.
        body_bytes: counts the bodies, together with the lines of batches.
        admin_paths: paths that need `admin_key` instead of an API key -> whether their requests compute something.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        is_full: Callable[[], bool] = lambda: False,
        body_bytes: BodyBytes | None = None,
        admin_paths: Mapping[str, bool] = {},
    ) -> None:
        self._app, self.config, self._is_full = app, config, is_full
        self._digests = [_digest(key) for key in config.keys]
        self._admin_paths = admin_paths
        self._admin_digests = [] if config.admin_key is None else [_digest(config.admin_key)]
        self._in_progress = 0
        self.body_bytes = body_bytes or BodyBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or TENANT in scope:  # TENANT: a line of a batch
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            _check_headers(scope)
            scope[TENANT] = None if scope["path"] in _OPEN else self._tenant(scope, headers)
            if scope["type"] == "http":
                self._check_room(scope, headers)
        except HttpError as error:
            limited = self._limited(scope, send) if scope["type"] == "http" else send
            await in_shape_of(scope, error_response(error))(scope, receive, limited)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return

        scope[HELD_BYTES] = 0
        body = _Body(self, scope, receive)
        takes_room = self._takes_room(scope)
        self._in_progress += takes_room
        try:
            await self._app(scope, body.receive, self._limited(scope, send))
        finally:
            self._in_progress -= takes_room
            self.body_bytes.count -= scope[HELD_BYTES]

    def _limited(self, scope: Scope, send: Send) -> Send:
        """Return a `send` that disconnects a client that reads nothing for `send_seconds`."""
        seconds = self.config.send_seconds

        async def limited_send(message: MutableMapping[str, Any]) -> None:
            connection: Connection | None = scope.get(CONNECTION)
            if connection is None:  # another ASGI server, which closes the connection after an exception
                async with asyncio.timeout(seconds):
                    await send(message)
                return
            await send(message)
            if not await _is_read(connection, seconds):
                await _disconnect(connection)

        return limited_send

    def _tenant(self, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
        """Check host, origin and key, the key in constant time. Return its tenant, or None if the server has no keys."""
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        is_local = is_loopback(self.config.host) and self.config.uds is None  # a proxy before a Unix socket passes its own name
        if not self._digests and is_local and not is_loopback(_url_part("hostname", f"//{host}")):
            wrong = f"the header Host names {short_repr(host)}, not this machine" if host else "the request has no header Host"
            reason = f"{wrong}; use localhost, or start the server with api_key"
            raise HttpError(403, reason, "wrong_host")
        writes = scope["type"] == "websocket" or scope["method"] in ("POST", "DELETE")
        page = None if origin is None else _url_part("netloc", origin.decode("latin-1"))
        is_allowed = origin is not None and origin.decode("latin-1") in self.config.origins
        if writes and page is not None and (not page or page != host) and not is_allowed:
            reason = "pages of other origins may not use this server; serve the page from it, keep the header Host in a proxy, "
            reason += "or start the server with allowed_origins"
            raise HttpError(403, reason, "wrong_origin")
        is_admin = scope["path"] in self._admin_paths
        digests = self._admin_digests if is_admin else self._digests
        if not digests and not is_admin:
            return None
        digest = sha256(_key(scope, headers)).digest()
        matches = [hmac.compare_digest(digest, tenant_digest) for tenant_digest in digests]
        if not any(matches):
            name = "admin key" if is_admin else "API key"
            reason = f"the {name} is missing or wrong; give the header Authorization: Bearer KEY (or x-api-key: KEY)"
            raise HttpError(401, reason, "invalid_api_key")
        if is_admin:
            return None
        return sha256(b"tenant:" + digest).hexdigest()

    def _check_room(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise HttpError if the body is too large, or too many requests or media are in progress."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20:
            raise _too_large(self.config.max_body_bytes)
        self.check_size(int(length), int(length))
        takes_room = self._takes_room(scope)
        if takes_room and self._in_progress >= self.config.max_requests:
            reason = f"the server has {self.config.max_requests} requests in progress (max_requests); try again later"
            raise HttpError(429, reason, "overloaded")
        if takes_room and self._is_full():
            reason = "the media of the requests in progress are larger than max_total_bytes; try again later"
            raise HttpError(429, reason, "overloaded")

    def _takes_room(self, scope: Scope) -> bool:
        """Return whether a request counts against `max_requests`. One that cancels makes room, also on a full server.

        Administrators act when a server is full; most of what they ask for computes nothing.
        """
        path = scope["path"]
        return scope["method"] == "POST" and self._admin_paths.get(path, True) and not _CANCEL.fullmatch(path)

    def check_size(self, size: int, further: int) -> None:
        """Raise HttpError if a body of this size, of which `further` bytes are not counted yet, is too large."""
        if size > self.config.max_body_bytes:
            raise _too_large(self.config.max_body_bytes)
        if self.body_bytes.count + further > self.config.max_total_body_bytes:
            limit = self.config.max_total_body_bytes
            reason = (
                f"the bodies of the requests in progress are larger than {limit} bytes (max_total_body_bytes); try again later"
            )
            raise HttpError(429, reason, "overloaded")


async def _is_read(connection: Connection, seconds: float) -> bool:
    """Wait until the client has read most of what was sent. Return False once it reads nothing for some seconds."""
    unsent = connection.unsent
    while True:
        try:
            async with asyncio.timeout(seconds):
                await connection.drain()
            return True
        except TimeoutError:
            if connection.unsent >= unsent:
                return False
            unsent = connection.unsent


async def _disconnect(connection: Connection) -> None:
    """Close the connection of a client that reads nothing. What its response still sends is dropped."""
    if (record := current_record.get()) is not None:
        record.disconnected = True
    connection.abort()
    await asyncio.sleep(0)  # uvicorn learns that the connection is closed


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_headers(scope: Scope) -> None:
    """Raise HttpError for headers that a proxy may read in another way than this server, and for compressed bodies."""
    names = [name for name, _ in scope["headers"]]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise HttpError(
                400, f"the header {name.decode().title()} is given more than once; give it once", "duplicate_header"
            )
    if has_two_lengths(scope["headers"]):
        reason = "the request has both Content-Length and Transfer-Encoding; give one of them"
        raise HttpError(400, reason, "invalid_http")
    encodings = [value.strip().lower() for name, value in scope["headers"] if name == b"content-encoding"]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        reason = "the header Content-Encoding is set, but bodies are not decompressed; send the body without compression"
        raise HttpError(415, reason, "unsupported_media_type")


def _key(scope: Scope, headers: dict[bytes, bytes]) -> bytes:
    """Return a request's key: in the header, or for pages, which cannot set a header, in a subprotocol of the WebSocket."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    if b"x-api-key" in headers:  # Anthropic's
        return headers[b"x-api-key"]
    for name in scope.get("subprotocols", ()):
        if name.startswith(_KEY_PROTOCOL):
            return str(name).removeprefix(_KEY_PROTOCOL).encode("utf-8", "surrogateescape")
        if name.startswith(_BASE64_PROTOCOL):
            text = str(name).removeprefix(_BASE64_PROTOCOL)
            try:
                return urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except ValueError:
                return b""
    return b""


def _url_part(name: str, url: str) -> str:
    """Return a part of a URL, or an empty text if the URL is malformed or lacks it."""
    try:
        return getattr(urlsplit(url), name) or ""
    except ValueError:
        return ""


def has_two_lengths(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request has both Content-Length and Transfer-Encoding, after which RFC 9112 closes the connection."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}


class _Body:
    """Receives one request's body within the limits on its size, time and values."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive) -> None:
        self._guard, self._scope, self._receive, self._is_form = guard, scope, receive, scope["path"] in FORMS
        self._end = asyncio.get_running_loop().time() + guard.config.body_seconds
        self._size = self._values = 0
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
            self._guard.check_size(self._size + len(block), len(block))
        except HttpError as error:  # FastAPI passes no other class on
            raise HTTPException(error.status, error.message) from None
        self._size += len(block)
        self._scope[HELD_BYTES] += len(block)
        self._guard.body_bytes.count += len(block)
        self._values += 0 if self._is_form else sum(map(block.count, (b",", b"[", b"{")))
        if self._values > MAX_VALUES:
            reason = f"the body has more than {MAX_VALUES} values (commas and opening brackets); send fewer at once"
            raise HTTPException(413, reason)
        return message


def _too_large(limit: int) -> HttpError:
    reason = f"the body is larger than {limit} bytes (max_body_bytes); send a smaller one"
    return HttpError(413, reason, "body_too_large")
