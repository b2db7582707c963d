"""Parts of /openapi.json that are not JSON bodies of requests: errors, types of responses, and forms of audio requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .protocol.audio import AudioForm, TranscriptionForm
from .protocol.batches import FileForm
from .protocol.body import Body

_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_TYPES = {"/metrics": "text/plain", "/v1/files/{file_id}/content": "application/octet-stream"}
FORMS: dict[str, type[Body]] = {
    "/v1/audio/transcriptions": TranscriptionForm,
    "/v1/audio/translations": AudioForm,
    "/v1/files": FileForm,
}
"""Endpoints whose body is a form."""


class ErrorObject(BaseModel):
    """OpenAI's error object, with the item at fault."""

    message: str
    type: str
    param: str | None
    code: str
    modality: str | None = None
    index: int | None = None


class ErrorBody(BaseModel):
    error: ErrorObject


def route_options(method: str, path: str) -> dict[str, Any]:
    """Return the arguments of `add_api_route` that describe an endpoint."""
    types = [_TYPES.get(path, "application/json")]
    types += ["text/event-stream"] if path in _STREAMED or "/audio/" in path else []
    types += ["text/plain"] if "/audio/" in path else []
    errors = {"4XX": {"model": ErrorBody, "description": "an error of the request"}}
    errors["5XX"] = {"model": ErrorBody, "description": "an error of the server"}
    found: dict[str, Any] = {"response_model": None}
    found["responses"] = {200: {"content": {name: {"schema": {}} for name in types}}, **errors}
    if method == "POST" and path in FORMS:
        content = {"multipart/form-data": {"schema": _form_schema(path)}}
        found["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return found


def _form_schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = FORMS[path].model_json_schema()
    if schema.pop("$defs", None):  # objects within forms
        for name, one in schema["properties"].items():
            if "$ref" in str(one):
                schema["properties"][name] = {"type": "object"}
    schema["properties"]["file"] = {"type": "string", "format": "binary"}
    schema["required"] = ["file", *schema.get("required", ())]
    return schema
