"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..mm.errors import SensoriumError
from .batch_runner import BatchRunner
from .endpoints import audio, batches, chat, completions, pooling, realtime, responses, status, tokens
from .endpoints.page import PAGE_FILES, page_file
from .errors import HttpError, on_error
from .guard import Guard
from .large_json import LargeJsonRoute
from .openapi import route_options
from .state import Server

_GET: Mapping[str, Callable[..., Any]] = {
    "/health": status.health,
    "/ready": status.ready,
    "/version": status.version,
    "/metrics": status.metrics,
    "/v1/models": status.models,
    "/v1/models/{name:path}": status.model,
    "/v1/files": batches.list_files,
    "/v1/files/{file_id}": batches.file,
    "/v1/files/{file_id}/content": batches.file_content,
    "/v1/batches": batches.list_batches,
    "/v1/batches/{batch_id}": batches.batch,
}

_POST: Mapping[str, Callable[..., Any]] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.responses,
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
    "/v1/files": batches.upload,
    "/v1/batches": batches.create_batch,
    "/v1/batches/{batch_id}/cancel": batches.cancel_batch,
}

_DELETE: Mapping[str, Callable[..., Any]] = {"/v1/files/{file_id}": batches.delete_file}


def make_app(server: Server) -> FastAPI:
    """Return the application of a server, for uvicorn or any other ASGI server."""
    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "lifespan": _lifespan}
    app = FastAPI(title="sensorium", version=metadata.version("sensorium"), **options)
    app.state.server = server
    app.router.route_class = LargeJsonRoute
    for method, table in ("GET", _GET), ("POST", _POST), ("DELETE", _DELETE):
        for path, endpoint in table.items():
            app.add_api_route(path, endpoint, methods=[method], **route_options(method, path))
            if method == "GET":
                app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    for path, file in PAGE_FILES.items():
        app.add_api_route(path, page_file(file), methods=["GET"], include_in_schema=False)
    app.add_api_websocket_route("/v1/realtime", realtime.realtime)
    for kind in (SensoriumError, HttpError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    is_full, body_bytes = (lambda: server.engine.llm.media_full), server.body_bytes
    app.add_middleware(Guard, config=server.config, is_full=is_full, body_bytes=body_bytes)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run batches while the application runs."""
    server: Server = app.state.server
    if server.store is None:
        yield
        return
    server.batches = BatchRunner(server.store, server.config, app, server.body_bytes)
    async with server.batches.running():
        yield
