"""The application that Ray's proxy calls: it checks requests, chooses the model's replica and passes the response on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from ...callers.errors import short_repr
from ..config import ServerConfig
from ..cors import with_cors
from ..error_shapes import in_shape_of
from ..errors import HttpError, error_response
from ..events import error_chunk
from ..guard import TENANT, App, Guard, Receive, Scope, Send
from ..large_json import LARGE, loads
from ..openapi import FORMS
from ..protocol.ollama import LATEST
from .bridge import message_of
from .routing import routing_key

Part = tuple[int, Sequence[tuple[bytes, bytes]]] | bytes
Model = Callable[[str | None, Mapping[str, Any], bytes], AsyncGenerator[Part, None]]
"""Sends a request to a replica: routing key, scope and body -> status and headers, then bytes."""
_ATTEMPTS = 3
"""How often a request is sent whose replica ends before it has answered anything."""
_CARD = "/v1/models/"
_LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}
"""Paths that list models -> the field with the list."""
_log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica of a request has ended, or takes no requests. Its text says which."""


class Ingress:
    """ASGI application behind `guard.Guard`.

    Args:
        models: by each name that requests may give, adapters included. The first one has the requests without a name.
        is_ready: whether all deployments have their replicas.
    """

    def __init__(self, models: Mapping[str, Model], is_ready: Callable[[], bool]) -> None:
        self._models, self._is_ready = models, is_ready
        self._default, self._is_only = next(iter(models.values())), len({*models.values()}) == 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            if path in ("/health", "/ping"):
                await JSONResponse({"status": "ok"})(scope, receive, send)
            elif path == "/ready":
                await (await self._ready())(scope, receive, send)
            elif path == "/metrics":
                reason = "each replica has metrics of its own, and this address reaches one of them; Ray has those of requests"
                raise HttpError(404, reason, "not_found")
            elif path in _LISTS and scope["method"] in ("GET", "HEAD"):
                await self._list_models(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send)
        except (HttpError, HTTPException, ReplicaLost) as error:
            http_error = _lost() if isinstance(error, ReplicaLost) else error
            await in_shape_of(scope, error_response(http_error))(scope, receive, send)

    async def _ready(self) -> Callable[..., Any]:
        if await asyncio.to_thread(self._is_ready):
            return JSONResponse({"status": "ok"})
        return error_response(HttpError(503, "replicas are being started; ask again later", "engine_restarting"))

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the lists of all models, joined."""
        answers = [await _whole(model(None, message_of(scope), b"")) for model in dict.fromkeys(self._models.values())]
        failed = next(((status, body) for status, body in answers if status != 200), None)
        if failed is not None:
            await JSONResponse(failed[1], failed[0])(scope, receive, send)
            return
        field = _LISTS[scope["path"]]
        joined = answers[0][1] | {field: [card for _, body in answers for card in body[field]]}
        if "last_id" in joined:
            joined["last_id"] = joined["data"][-1]["id"]
        await JSONResponse(joined)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request to a replica and its response to the client."""
        body = await _read(receive)
        name, key = await self._read_fields(scope, body)
        model = self._default if name is None or self._is_only else self._find(name)
        sender = _Sender(scope, send)
        for attempt in range(_ATTEMPTS):
            try:
                async with aclosing(model(key, message_of(scope), body)) as parts:
                    async for part in parts:
                        await sender.send(part)
                await sender.end()
                return
            except ReplicaLost as error:
                _log.warning("a request has lost its replica: %s", error)
                if sender.has_started or attempt == _ATTEMPTS - 1:
                    await sender.fail(_lost())
                    return

    def _find(self, name: str) -> Model:
        if name not in self._models:
            names = ", ".join(map(short_repr, [*self._models][:8]))
            reason = f"the model {short_repr(name)} does not exist; this server has {names}"
            raise HttpError(404, reason, "model_not_found", "model")
        return self._models[name]

    async def _read_fields(self, scope: Scope, body: bytes) -> tuple[str | None, str | None]:
        """Return the name of a request's model and its routing key. The replica reports malformed bodies."""
        name, key, path = None, None, scope["path"]
        if path.startswith(_CARD):
            name = path.removeprefix(_CARD)
        elif path in FORMS:
            name = None if self._is_only else await _form_field(scope, body, "model")
        elif body:
            try:
                fields = loads(body) if len(body) <= LARGE else await asyncio.to_thread(loads, body)
            except (ValueError, RecursionError):
                return None, None
            name = fields.get("model") if isinstance(fields, dict) else None
            if isinstance(name, str) and path.startswith("/api/"):
                name = name.removesuffix(LATEST)
            key = await asyncio.to_thread(routing_key, fields, scope[TENANT])
        else:
            name = Request(scope).query_params.get("model")  # of the voices
        return name if isinstance(name, str) else None, key


def make_ingress(models: Mapping[str, Model], is_ready: Callable[[], bool], config: ServerConfig) -> App:
    """Return the ingress with the checks of the server around it; see `Ingress`."""
    app = Guard(Ingress(models, is_ready), config)
    return with_cors(app, config.origins) if config.origins else app


def _lost() -> HttpError:
    reason = "the replica with this request has ended or takes no more requests; send it again"
    return HttpError(503, reason, "engine_dead")


class _Sender:
    """Sends the parts of a response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._headers: Headers | None = None

    @property
    def has_started(self) -> bool:
        return self._headers is not None

    async def send(self, part: Part) -> None:
        if isinstance(part, bytes):
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            return
        status, headers = part
        self._headers = Headers(raw=[*headers])
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def end(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """End with an error: a response, or an event of a stream that has begun. Other responses are cut off."""
        if self._headers is None:
            await in_shape_of(self._scope, error_response(error))(self._scope, _no_message, self._send)
            return
        chunk = error_chunk(self._scope, self._headers.get("content-type", ""), error)
        if chunk is None:
            raise error
        await self.end(chunk)


async def _no_message() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


async def _read(receive: Receive) -> bytes:
    """Return the body of a request, within the limits of `guard.Guard`."""
    blocks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(499, "the client has disconnected", "client_disconnected")
        blocks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(blocks)


async def _form_field(scope: Scope, body: bytes, name: str) -> str | None:
    """Return a text field of a form, or None."""

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(scope, receive).form() as form:
            value = form.get(name)
    except Exception:  # the replica reads it again and says what is wrong
        return None
    return value if isinstance(value, str) else None


async def _whole(parts: AsyncGenerator[Part, None]) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of a response."""
    status, blocks = 500, []
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, bytes):
                blocks.append(part)
            else:
                status = part[0]
    return status, json.loads(b"".join(blocks))
