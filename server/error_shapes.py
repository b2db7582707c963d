"""Errors in the shapes of the APIs beside OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from .request_record import current_record

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Status -> type of Anthropic's error object; others of the request are as 400, others of the server are "api_error"."""


def in_shape_of(scope: MutableMapping[str, Any], response: JSONResponse) -> JSONResponse:
    """Return an error's response in the shape of the API that a request is for."""
    if not is_anthropic(scope) and not scope["path"].startswith("/api/"):
        return response
    status, body = response.status_code, json.loads(bytes(response.body))
    headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    return JSONResponse(anthropic_body(status, body) if is_anthropic(scope) else ollama_body(body), status, headers)


def is_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a request is for Anthropic's API: its clients name the version in a header."""
    return scope["path"].startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"])


def anthropic_body(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Anthropic's error object for OpenAI's. Agents know by its first words that a prompt is too long."""
    error = body["error"]
    kind = _ANTHROPIC.get(status, _ANTHROPIC[400] if status < 500 else "api_error")
    record = current_record.get()
    message = f"prompt is too long: {error['message']}" if error["code"] == "too_long" else error["message"]
    return {
        "type": "error",
        "error": {"type": kind, "message": _with_param(message, error["param"]), "code": error["code"]},
        "request_id": None if record is None else record.id,
    }


def ollama_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's error object for OpenAI's."""
    return {"error": _with_param(body["error"]["message"], body["error"]["param"])}


def _with_param(message: str, param: str | None) -> str:
    return f"{param}: {message}" if param and param not in message else message
