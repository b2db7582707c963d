"""The ASGI application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..mm.errors import SensoriumError
from .endpoints import audio, chat, completions, pooling, status, tokens
from .errors import HttpError, on_error
from .guard import Guard
from .state import Server

_GET: Mapping[str, Callable[..., Any]] = {
    "/health": status.health,
    "/ready": status.ready,
    "/version": status.version,
    "/metrics": status.metrics,
    "/v1/models": status.models,
    "/v1/models/{name:path}": status.model,
}

_POST: Mapping[str, Callable[..., Any]] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/embeddings": pooling.embeddings,
    "/score": pooling.score,
    "/v1/score": pooling.score,
    "/rerank": pooling.rerank,
    "/v1/rerank": pooling.rerank,
    "/v2/rerank": pooling.rerank,
    "/classify": pooling.classify,
    "/v1/audio/transcriptions": audio.transcriptions,
    "/v1/audio/translations": audio.translations,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/v1/media/plan": tokens.media_plan,
}


def make_app(server: Server) -> FastAPI:
    """Return the application of a server, for uvicorn or any other ASGI server."""
    app = FastAPI(title="sensorium", version=metadata.version("sensorium"), docs_url=None, redoc_url=None)
    app.state.server = server
    for path, endpoint in _GET.items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    for path, endpoint in _POST.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for kind in (SensoriumError, HttpError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Guard, config=server.config)
    return app
