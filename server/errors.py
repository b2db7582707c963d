"""Errors as responses: the only place that knows statuses and OpenAI's error object."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..engine.errors import error_info
from ..mm.errors import ErrorInfo, SensoriumError, clip, one_line, short_repr

_STATUS = {
    "invalid_input": 400,
    "invalid_media": 400,
    "too_long": 400,
    "invalid_config": 400,
    "not_found": 404,
    "gated": 403,
    "encoder_failed": 422,
    "overloaded": 429,
    "out_of_memory": 503,
    "interrupted": 503,
    "engine_asleep": 503,
    "engine_closed": 503,
    "engine_dead": 503,
}
"""Status by `ErrorCode`; the others are 500."""
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    499: "client_disconnected",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_SECONDS = "1"
_log = logging.getLogger(__name__)


class HttpError(Exception):
    """An error that only HTTP has, such as a wrong key.

    Args:
        code: as in OpenAI's error object.
        param: the field at fault.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


def error_body(info: ErrorInfo) -> tuple[int, dict[str, Any]]:
    """Return the status and OpenAI's error object of an ErrorInfo. Details of internal errors are in the log only."""
    status = _STATUS.get(info.code, 500)
    message = "internal error; the server's log has the details" if info.code == "internal" else info.message
    item = {} if info.modality is None else {"modality": info.modality, "index": info.index}
    return status, _body(status, message, info.code, info.param, item)


def error_response(error: BaseException | ErrorInfo) -> JSONResponse:
    """Return the response of any error."""
    if isinstance(error, ClientDisconnect):  # while its body was read
        error = HttpError(499, "the client has disconnected", "client_disconnected")
    if isinstance(error, HttpError):
        return _response(error.status, _body(error.status, error.message, error.code, error.param))
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "invalid_input")
        response = _response(error.status_code, _body(error.status_code, str(error.detail), code, None))
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, RequestValidationError):
        return _response(*_invalid(error))
    return _response(*error_body(error if isinstance(error, ErrorInfo) else error_info(error, "a request")))


def error_object(error: BaseException | ErrorInfo) -> dict[str, Any]:
    """Return the error object of any error's response."""
    found: dict[str, Any] = json.loads(bytes(error_response(error).body))["error"]
    return found


def validation_error(error: ValidationError) -> RequestValidationError:
    """Convert the validation error of a body that FastAPI does not read itself."""
    return RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Handle an exception of an endpoint, or a path or method that has none."""
    if isinstance(error, HTTPException) and error.detail in ("Not Found", "Method Not Allowed"):
        path = short_repr(request.scope["path"], 100)
        error.detail = f"there is no {request.scope.get('method', '')} {path}; see /openapi.json for the paths and methods"
    return error_response(error)


def _response(status: int, body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, status, {"Retry-After": _RETRY_SECONDS} if status in (429, 503) else None)


def _body(status: int, message: str, code: str, param: str | None, item: Mapping[str, object] | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else clip(param)
    return {"error": {"message": one_line(clip(message)), "type": kind, "param": param, "code": code, **(item or {})}}


def _invalid(error: RequestValidationError) -> tuple[int, dict[str, Any]]:
    """Return status and body of the first thing that is wrong in a request's body."""
    first: dict[str, Any] = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SensoriumError):
        return error_body(cause.info)
    place = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:]]
    param = "".join(place).removeprefix(".") or None
    if first["type"] == "json_invalid":
        message, param = f"the body is not JSON: {cause} at character {first['loc'][-1]}", None
    elif param is None and isinstance(first.get("input"), bytes):
        reason = "the body must be JSON with the header Content-Type: application/json"
        return 415, _body(415, reason, "unsupported_media_type", None)
    elif first["type"] == "extra_forbidden":
        message = f"unknown field {short_repr(param)}; remove it, or see /openapi.json for the fields of this endpoint"
    elif first["type"] == "missing":
        message = f"{param or 'the body'} is missing; give it"
    else:
        message = f"{param or 'the body'} is {short_repr(first.get('input'))}: {first['msg']}"
    return 400, _body(400, message, "invalid_input", param)
