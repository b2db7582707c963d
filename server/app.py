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

from ..callers.errors import SensoriumError
from .access_log import AccessLog
from .background import STOPPED
from .batch_runner import BatchRunner
from .cors import with_cors
from .drain import Drain
from .endpoints import (
    audio,
    batches,
    chat,
    completions,
    documents,
    invocations,
    messages,
    ollama,
    ollama_models,
    ollama_vectors,
    pooling,
    realtime,
    responses,
    speech,
    status,
    stored_responses,
    tokens,
)
from .endpoints.admin import ADMIN_PATHS, COMPUTING_PATHS
from .endpoints.page import PAGE_FILES, SAMPLE_FILES, page_file
from .errors import HttpError, on_error
from .guard import Guard
from .large_json import LargeJsonRoute
from .model_routes import ReleaseModels, on_model
from .openapi import route_options
from .root_path import RootPath
from .state import Services
from .unknown_fields import UnknownFields

_GET: Mapping[str, Callable[..., Any]] = {
    "/health": status.health,
    "/ready": status.ready,
    "/ping": status.health,
    "/version": status.version,
    "/metrics": status.metrics,
    "/v1/models": status.models,
    "/v1/models/{name:path}": status.model,
    "/v1/audio/voices": speech.voices,
    "/api/version": ollama_models.version,
    "/api/tags": ollama_models.tags,
    "/api/ps": ollama_models.running,
    "/v1/files": batches.list_files,
    "/v1/files/{file_id}": batches.file,
    "/v1/files/{file_id}/content": batches.file_content,
    "/v1/responses/{response_id}": stored_responses.response,
    "/v1/responses/{response_id}/input_items": stored_responses.input_items,
    "/v1/batches": batches.list_batches,
    "/v1/batches/{batch_id}": batches.batch,
}

_POST: Mapping[str, Callable[..., Any]] = {
    "/ping": status.health,
    "/invocations": invocations.invocations,
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/responses": responses.responses,
    "/v1/responses/input_tokens": responses.input_tokens,
    "/v1/responses/{response_id}/cancel": stored_responses.cancel_response,
    "/v1/messages": messages.messages,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/show": ollama_models.show,
    "/api/embed": ollama_vectors.embed,
    "/api/embeddings": ollama_vectors.embeddings,
    "/v1/embeddings": pooling.embeddings,
    "/score": pooling.score,
    "/v1/score": pooling.score,
    "/rerank": pooling.rerank,
    "/v1/rerank": pooling.rerank,
    "/v2/rerank": pooling.rerank,
    "/classify": pooling.classify,
    "/v1/audio/transcriptions": audio.transcriptions,
    "/v1/audio/translations": audio.translations,
    "/v1/audio/speech": speech.speech,
    "/v1/documents": documents.documents,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/v1/media/plan": tokens.media_plan,
    "/v1/files": batches.upload,
    "/v1/batches": batches.create_batch,
    "/v1/batches/{batch_id}/cancel": batches.cancel_batch,
}

_DELETE: Mapping[str, Callable[..., Any]] = {
    "/v1/files/{file_id}": batches.delete_file,
    "/v1/responses/{response_id}": stored_responses.delete_response,
}

_WITHOUT_MODEL = ("/v1/batches", "/api/show", "/invocations")
"""Endpoints with a body that need no model to be loaded, or see to it themselves."""


def make_app(services: Services) -> FastAPI:
    """Return the application of a server, for uvicorn or any other ASGI server."""
    config, is_fixed = services.config, services.pool.is_fixed
    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "lifespan": _lifespan}
    app = FastAPI(title="sensorium", version=metadata.version("sensorium"), **options)
    app.state.services = services
    app.router.route_class = LargeJsonRoute
    for method, table in ("GET", _GET), ("POST", _POST), ("DELETE", _DELETE):
        for path, plain_endpoint in table.items():
            takes_model = "body" in plain_endpoint.__annotations__ and path not in _WITHOUT_MODEL
            endpoint = on_model(path, plain_endpoint) if takes_model and not is_fixed else plain_endpoint
            app.add_api_route(path, endpoint, methods=[method], **route_options(method, path))
            if method == "GET":
                app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    admin_paths = {} if config.admin_key is None else ADMIN_PATHS
    for path, (methods, endpoint) in admin_paths.items():
        app.add_api_route(path, endpoint, methods=[*methods], include_in_schema=False)
    for path, file in (PAGE_FILES | SAMPLE_FILES).items():
        app.add_api_route(path, page_file(file), methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_websocket_route("/v1/realtime", realtime.realtime)
    app.add_api_websocket_route("/{path:path}", realtime.no_session)
    for kind in (SensoriumError, HttpError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, on_error)
    if not is_fixed:
        app.add_middleware(ReleaseModels)
    if config.allow_unknown_fields:
        app.add_middleware(UnknownFields, registry=services.registry)
    is_full, body_bytes = services.is_full, services.body_bytes
    guarded = {path: path in COMPUTING_PATHS for path in admin_paths}
    app.add_middleware(Guard, config=config, is_full=is_full, body_bytes=body_bytes, admin_paths=guarded)
    app.add_middleware(Drain, drain=services.draining)
    if origins := config.origins:
        app.add_middleware(with_cors, origins=origins)
    app.add_middleware(AccessLog, writes=config.access_log, metrics=services.http_metrics)
    if config.root_path is not None:
        app.add_middleware(RootPath, prefix=config.root_path.rstrip("/"))
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run batches while the application runs."""
    services: Services = app.state.services
    for server in services.pool.loaded if services.pool.is_fixed else ():
        server.warn_about_reasoning()
    services.pool.watch_idle()
    _ = services.reasoning_signer  # a key that cannot be used ends the start
    if services.store is None:
        yield
        return
    services.batches = BatchRunner(services.store, services.config, app, services.body_bytes)
    await services.store.call(services.store.fail_unfinished, STOPPED)
    async with services.batches.running():
        yield
        await services.background.close(services.config.drain_seconds)
