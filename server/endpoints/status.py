"""Endpoints about the server: health, version, models and metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib import metadata

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import SensoriumError
from ..error_shapes import is_anthropic
from ..errors import HttpError, error_response
from ..metrics_text import metrics_text
from ..model_facts import ModelFacts
from ..state import server_of, services_of


async def health(request: Request) -> Response:
    """Answer 200 while the engine works; 503 after it was closed or its process died. See `check_engines`."""
    try:
        await check_engines(request)
    except SensoriumError as error:
        return error_response(error)
    return JSONResponse({"status": "ok"})


async def check_engines(request: Request) -> None:
    """Raise the error of an engine that does not work. Of several, only those with requests count: others are loaded again."""
    pool = services_of(request).pool
    for pooled in pool.models:
        if pooled.model is not None and (pool.is_fixed or pooled.leases):
            await pooled.model.llm.check_health()


async def ready(request: Request) -> Response:
    """Answer 200 if the engine takes requests; 503 also while it sleeps or its process is restarted.

    With several models, requests wait for theirs.
    """
    response, pool = await health(request), services_of(request).pool
    if not pool.is_fixed:
        return response
    engine = server_of(request).engine
    if response.status_code == 200 and engine.asleep:
        return error_response(HttpError(503, "the engine sleeps; POST /wake_up wakes it up", "engine_asleep"))
    if response.status_code == 200 and engine.loop.is_restarting:
        return error_response(HttpError(503, "the engine's process is being restarted; ask again later", "engine_restarting"))
    return response


async def version() -> Response:
    return JSONResponse({"version": metadata.version("sensorium")})


async def models(request: Request) -> Response:
    pooled_models = services_of(request).pool.models
    data = [_model_card(request, name) for pooled in pooled_models for name in (*pooled.names, *pooled.adapters)]
    if is_anthropic(request.scope):
        return JSONResponse({"data": data, "first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False})
    return JSONResponse({"object": "list", "data": data})


async def model(name: str, request: Request) -> Response:
    return JSONResponse(_model_card(request, name))


def _model_card(request: Request, name: str) -> dict[str, object]:
    services = services_of(request)
    pooled = services.pool.find(name)
    facts: ModelFacts = pooled.facts if pooled.model is None else pooled.model.facts
    if is_anthropic(request.scope):
        created = datetime.fromtimestamp(services.created, UTC).isoformat()
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": created,
            "max_input_tokens": facts.max_model_len,
        }
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "sensorium",
        "max_model_len": facts.max_model_len,
        "capabilities": facts.capabilities,
        **({} if services.pool.is_fixed else {"root": pooled.name, "state": pooled.state}),
        **({"parent": pooled.name} if name in pooled.adapters else {}),
    }


async def metrics(request: Request) -> Response:
    """Return the engine's metrics in Prometheus' text format."""
    from prometheus_client import CONTENT_TYPE_LATEST

    registries = services_of(request).registries
    if not registries:
        raise HttpError(404, "this server has no metrics", "not_found")
    return Response(await asyncio.to_thread(metrics_text, registries), headers={"Content-Type": CONTENT_TYPE_LATEST})
