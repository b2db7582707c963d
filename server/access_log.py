"""A line of the log for each request, and its id in the response."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from ..engine.frontend.trace import on_request_end, trace_context
from .error_shapes import is_anthropic
from .guard import TENANT, App, Receive, Scope, Send
from .logs import FIELDS
from .request_record import RequestRecord, current_record, request_id
from .tracing import set_trace_context

_ID, _ANTHROPIC_ID = b"x-request-id", b"request-id"
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")  # the last one refuses a WebSocket
_FINGERPRINT = 12  # characters of a tenant's hash
_MAX_PATH = 200  # characters
_QUIET = {"/health", "/ready", "/metrics", "/ping", "/load"}  # asked every few seconds; their lines have the level debug
_log = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware around all others that notes each request. Bodies, keys and queries never reach the log.

    Args:
        writes: write the lines; the record and the header X-Request-Id are made in any case.
        metrics: counts each record.
    """

    def __init__(self, app: App, writes: bool, metrics: Any = None) -> None:
        self._app, self._writes, self._metrics = app, writes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or TENANT in scope:  # TENANT: a line of a batch
            await self._app(scope, receive, send)
            return
        ids = [value for name, value in scope["headers"] if name == _ID]
        method = scope.get("method", "WEBSOCKET")
        record = RequestRecord(request_id(ids[0] if len(ids) == 1 else None), method, _printable(scope["path"]))
        tokens = current_record.set(record), on_request_end.set(record.count_tokens), set_trace_context(scope["headers"])
        try:
            await self._app(scope, _noting_receive(record, receive), _noting_send(record, scope, send))
        finally:
            current_record.reset(tokens[0])
            on_request_end.reset(tokens[1])
            trace_context.reset(tokens[2])
            record.tenant = _fingerprint(scope)
            if self._metrics is not None:
                self._metrics.observe(record, _route(scope))
            if self._writes:
                level = logging.DEBUG if record.path in _QUIET and record.outcome == "ok" else logging.INFO
                _log.log(level, "request", extra={FIELDS: record.fields})


def background_record(scope: Scope) -> RequestRecord | None:
    """Return a record of what goes on after the current request; None if this has none."""
    record = current_record.get()
    return record and RequestRecord(record.id, record.method, record.path, _fingerprint(scope), record.model)


def log_background(record: RequestRecord, response_id: str, status: str) -> None:
    """Log the end of a response in the background, with its tokens, which the line of its request lacks."""
    names = ("request_id", "path", "seconds", "model", "prompt_tokens", "completion_tokens", "tenant")
    fields = {name: value for name, value in record.fields.items() if name in names}
    outcome = {"failed": "error", "cancelled": "cancelled"}.get(status, "ok")
    _log.info("response in the background", extra={FIELDS: {**fields, "outcome": outcome, "response_id": response_id}})


def _fingerprint(scope: Scope) -> str | None:
    tenant = scope.get(TENANT)
    return None if tenant is None else tenant[:_FINGERPRINT]


def _noting_receive(record: RequestRecord, receive: Receive) -> Receive:
    async def receive_and_note() -> MutableMapping[str, Any]:
        message = await receive()
        record.bytes_in += len(message.get("body") or message.get("bytes") or message.get("text") or b"")
        record.disconnected |= message["type"] == "http.disconnect" and not record.complete
        return message

    return receive_and_note


def _noting_send(record: RequestRecord, scope: Scope, send: Send) -> Send:
    names = (_ID, _ANTHROPIC_ID) if is_anthropic(scope) else (_ID,)

    async def send_and_note(message: MutableMapping[str, Any]) -> None:
        kind = message["type"]
        if kind in _STARTS:
            record.status, record.first_byte = message.get("status", 101), record.seconds
            message = {**message, "headers": [*message.get("headers", ()), *((name, record.id.encode()) for name in names)]}
        await send(message)
        record.bytes_out += len(message.get("body") or message.get("bytes") or message.get("text") or b"")
        record.complete |= kind == "http.response.body" and not message.get("more_body", False)

    return send_and_note


def _printable(path: str) -> str:
    """Return a path without line breaks, spaces and other characters that would forge lines or fields of the log."""
    return path.encode("unicode_escape").decode("ascii").replace(" ", "%20")[:_MAX_PATH]


def _route(scope: Scope) -> str:
    """Return the path of the endpoint with names in place of values, such as /v1/files/{file_id}; "none" if there is none."""
    route = scope.get("route")
    return getattr(route, "path", None) or "none"
