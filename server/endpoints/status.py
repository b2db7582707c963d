"""Endpoints about the server: health, version, models and metrics."""

from __future__ import annotations

import asyncio
from importlib import metadata

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...mm.errors import SensoriumError
from ..errors import HttpError, error_response
from ..state import server_of


async def health(request: Request) -> Response:
    """Answer 200 while the engine works; 503 after it was closed or its process died."""
    try:
        await server_of(request).engine.check_health()
    except SensoriumError as error:
        return error_response(error)
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Answer 200 if the engine takes requests; 503 also while it sleeps."""
    response = await health(request)
    if response.status_code == 200 and server_of(request).engine.llm.asleep:
        return error_response(HttpError(503, "the engine sleeps", "engine_asleep"))
    return response


async def version() -> Response:
    return JSONResponse({"version": metadata.version("sensorium")})


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(request)]})


async def model(name: str, request: Request) -> Response:
    server_of(request).check_model(name)
    return JSONResponse(_model_card(request))


def _model_card(request: Request) -> dict[str, object]:
    server = server_of(request)
    length = server.engine.llm.max_model_len
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "sensorium",
        "max_model_len": length,
        "capabilities": server.capabilities,
    }


async def metrics(request: Request) -> Response:
    """Return the engine's metrics in Prometheus' text format."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    registry = server_of(request).registry
    if registry is None:
        raise HttpError(404, "this server has no metrics", "not_found")
    return Response(await asyncio.to_thread(generate_latest, registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
