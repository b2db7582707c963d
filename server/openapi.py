"""Parts of /openapi.json that are not JSON bodies of requests: errors, types of responses, and forms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from ..pipelines.speech.sound_writer import MEDIA_TYPES
from .protocol.audio import AudioForm, TranscriptionForm
from .protocol.batches import FileForm
from .protocol.body import Body
from .protocol.documents import DocumentForm

_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/documents", "/invocations")
_TRANSCRIBED = ("/v1/audio/transcriptions", "/v1/audio/translations")
_TYPES = {"/metrics": "text/plain", "/v1/files/{file_id}/content": "application/octet-stream"}
FORMS: dict[str, type[Body]] = {
    "/v1/audio/transcriptions": TranscriptionForm,
    "/v1/audio/translations": AudioForm,
    "/v1/documents": DocumentForm,
    "/v1/files": FileForm,
}
"""Endpoints whose body is a form."""
_INVOCATIONS = ("ChatBody", "CompletionBody", "EmbeddingBody", "RerankBody", "ScoreBody", "ClassifyBody")
"""The bodies of /invocations, which are those of other endpoints."""


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


class AnthropicErrorObject(BaseModel):
    type: str
    message: str
    code: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object, with our code."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class OllamaErrorBody(BaseModel):
    error: str


def route_options(method: str, path: str) -> dict[str, Any]:
    """Return the arguments of `add_api_route` that describe an endpoint."""
    types = [_TYPES.get(path, "application/json")]
    types += ["text/event-stream"] if path in (*_STREAMED, *_TRANSCRIBED) else []
    types += ["text/markdown", "text/plain"] if path == "/v1/documents" else []
    types += ["application/x-ndjson"] if path in ("/api/chat", "/api/generate") else []
    types += ["text/plain"] if path in _TRANSCRIBED else []
    types = [*MEDIA_TYPES.values(), "text/event-stream"] if path == "/v1/audio/speech" else types
    model: type[BaseModel] = AnthropicErrorBody if path.startswith("/v1/messages") else ErrorBody
    model = OllamaErrorBody if path.startswith("/api/") else model
    errors: dict[str, Any] = {"4XX": {"model": model, "description": "an error of the request"}}
    errors["5XX"] = {"model": model, "description": "an error of the server"}
    options: dict[str, Any] = {"response_model": None}
    options["responses"] = {200: {"content": {name: {"schema": {}} for name in types}}, **errors}
    if path == "/invocations":
        bodies = [{"$ref": f"#/components/schemas/{name}"} for name in _INVOCATIONS]
        content = {"application/json": {"schema": {"anyOf": bodies}}}
        options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    if method == "POST" and path in FORMS:
        content = {"multipart/form-data": {"schema": _form_schema(path)}}
        options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return options


def _form_schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = FORMS[path].model_json_schema()
    if schema.pop("$defs", None):  # objects within forms
        for name, field in schema["properties"].items():
            if "$ref" in str(field):
                schema["properties"][name] = {"type": "object"}
    schema["properties"]["file"] = {"type": "string", "format": "binary"}
    schema["required"] = ["file", *schema.get("required", ())]
    return schema
