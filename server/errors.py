"""Errors as responses: the only place that knows statuses and OpenAI's error object."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..callers.errors import ErrorInfo, SensoriumError, clip, one_line, short_repr
from ..engine.errors import error_info
from .error_shapes import in_shape_of
from .wording import field_of, in_json, message_of

_STATUS = {
    "invalid_input": 400,
    "invalid_value": 400,
    "unknown_name": 400,
    "unsupported": 400,
    "over_limit": 400,
    "invalid_media": 400,
    "too_long": 400,
    "invalid_config": 400,
    "not_found": 404,
    "gated": 403,
    "encoder_failed": 422,
    "overloaded": 429,
    "busy": 503,
    "unreachable": 503,
    "out_of_memory": 503,
    "interrupted": 503,
    "engine_asleep": 503,
    "engine_closed": 503,
    "engine_dead": 503,
    "disk_full": 507,
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
_FORMS = {
    "dict_type": "an object",
    "list_type": "a list",
    **dict.fromkeys(("string_type", "string_unicode"), "a string"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "none_required": "null",
    "too_short": "a list with {min_length} or more entries",
    "too_long": "a list with at most {max_length} entries",
    "greater_than_equal": "{ge} or above",
    "less_than_equal": "{le} or below",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
}
"""Maps the type of an error of pydantic to a description of the values that are accepted."""
_BRANCH = re.compile(r"str|int|bool|(list|dict)\[.*\]")  # a name of pydantic in the place of a value of several types
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
    if info.code == "not_found" and info.param == "adapter":  # over HTTP, names of adapters are names of models
        return 404, _body(404, message_of(info), "model_not_found", "model", {})
    status = _STATUS.get(info.code, 500)
    internal = "internal error; the server's log has the details"
    message = internal if info.code == "internal" else message_of(info)
    item = {} if info.modality is None else {"modality": info.modality, "index": info.index}
    return status, _body(status, message, info.code, field_of(info.param), item)


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
    body: dict[str, Any] = json.loads(bytes(error_response(error).body))["error"]
    return body


def validation_error(error: ValidationError) -> RequestValidationError:
    """Convert the validation error of a body that FastAPI does not read itself."""
    return RequestValidationError([{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()])


@contextmanager
def naming_places(places: Mapping[str, str]) -> Iterator[None]:
    """Name the field of the request, such as "input[0].content[1]", in errors that name the chat's "messages[1].content[1]"."""
    try:
        yield
    except SensoriumError as error:
        param = field_of(error.info.param) or ""
        longest = max(
            (name for name in places if param == name or param.startswith((f"{name}.", f"{name}["))), key=len, default=None
        )
        if longest is not None:
            error.info = replace(error.info, param=places[longest] + param.removeprefix(longest))
        raise


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Handle an exception of an endpoint, or a path or method that has none."""
    if isinstance(error, HTTPException) and error.detail in ("Not Found", "Method Not Allowed"):
        path = short_repr(request.scope["path"], 100)
        error.detail = f"there is no {request.scope.get('method', '')} {path}; see /openapi.json for the paths and methods"
    return in_shape_of(request.scope, error_response(error))


def _response(status: int, body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, status, {"Retry-After": _RETRY_SECONDS} if status in (429, 503) else None)


def _body(status: int, message: str, code: str, param: str | None, item: Mapping[str, object] | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else clip(param)
    return {"error": {"message": one_line(clip(in_json(message))), "type": kind, "param": param, "code": code, **(item or {})}}


def _invalid(error: RequestValidationError) -> tuple[int, dict[str, Any]]:
    """Return status and body of what is wrong in a request's body: our own error, or the innermost value of a wrong form."""
    errors: Sequence[dict[str, Any]] = error.errors()
    for detail in errors:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, SensoriumError):
            places = filter(None, (_field(detail), cause.info.param))
            return error_body(replace(cause.info, param=".".join(places) or None))
    first = max(errors, key=lambda detail: len(_place(detail)))
    param = _field(first) or None
    name = param or "the body"
    if first["type"] == "json_invalid":
        message, param = f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    elif param is None and isinstance(first.get("input"), bytes):
        reason = "the body must be JSON with the header Content-Type: application/json"
        return 415, _body(415, reason, "unsupported_media_type", None)
    elif first["type"] == "extra_forbidden":
        message = f"unknown field {short_repr(param)}; remove it, or see /openapi.json for the fields of this endpoint"
    elif first["type"] == "missing":
        message = f"{name} is missing; give it"
    else:
        forms = dict.fromkeys(filter(None, (_form(detail) for detail in errors if _place(detail) == _place(first))))
        how = f"it must be {' or '.join(forms)}" if forms else first["msg"]
        message = f"{name} is {short_repr(first.get('input'))}; {how}"
    return 400, _body(400, message, "invalid_input", param)


def _form(error: Mapping[str, Any]) -> str:
    """Return what a value must be; "" if that is not known."""
    kind = "dict_type" if error["type"].startswith("model_") else error["type"]  # of a body, or of an object within it
    return _FORMS.get(kind, "").format(**error.get("ctx", {}))


def _field(error: Mapping[str, Any]) -> str:
    """Return the place of a value in the body as a name, such as "messages[0].content"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _place(error)).removeprefix(".")


def _place(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the place of a value in the body, without the names that pydantic gives to the parts of `A | B`."""
    return tuple(part for part in error["loc"][1:] if not (isinstance(part, str) and _BRANCH.fullmatch(part)))
