"""Endpoints for administrators, most under vLLM's names. They exist only with `admin_key`, which requests must have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import CheckpointError, InputError
from ..protocol.adapters import UpdateWeightsBody
from ..state import server_of, services_of
from .adapters import load_adapter, unload_adapter
from .encode import encode_media


async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1, model: str | None = None) -> Response:
    """Free the memory of the model until /wake_up, or of one of several until a request names it.

    Requests in progress make it fail.
    """
    pool = services_of(request).pool
    pooled = pool.find(model)
    if pool.is_fixed:
        await server_of(request).llm.sleep(level)
    else:
        await pool.sleep(pooled, level)
    return Response()


async def wake_up(
    request: Request,
    tags: Annotated[Sequence[Literal["weights", "kv_cache"]] | None, Query()] = None,
    model: str | None = None,
) -> Response:
    """Wake the model up, or wake or load one of several."""
    pool = services_of(request).pool
    pool.find(model)
    if pool.is_fixed:
        await server_of(request).llm.wake_up(tags)
    else:
        (await pool.acquire(model)).release()
    return Response()


async def update_weights(body: UpdateWeightsBody, request: Request) -> Response:
    """Replace weights by those of safetensors files on the server, and return the version of the weights."""
    lease = await services_of(request).pool.acquire(body.model)
    try:
        version = await lease.model.llm.update_weights(body.path, body.mode)
    except CheckpointError as error:  # the files of the request are at fault, and not the model's
        raise InputError(error.info.text, param="path") from None
    finally:
        lease.release()
    return JSONResponse({"weights_version": version})


async def is_sleeping(request: Request, model: str | None = None) -> Response:
    """Say whether the model sleeps. One of several that is not loaded sleeps, too."""
    server = services_of(request).pool.find(model).model
    return JSONResponse({"is_sleeping": server is None or await server.llm.is_sleeping()})


async def reset_prefix_cache(request: Request, model: str | None = None) -> Response:
    """Free the KV blocks that are kept for reuse. `success` is false if blocks of running sequences remain."""
    server = services_of(request).pool.find(model).model
    return JSONResponse({"success": server is None or await server.llm.reset_prefix_cache()})


async def reset_mm_cache(request: Request, model: str | None = None) -> Response:
    """Empty the cache of processed items."""
    server = services_of(request).pool.find(model).model
    if server is not None:
        await asyncio.to_thread(server.engine.inputs.media.reset_cache)
    return Response()


async def load(request: Request) -> Response:
    """Return the number of requests in progress."""
    return JSONResponse({"server_load": len(services_of(request).draining.tasks) - 1})  # without this one


ADMIN_PATHS: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "/sleep": (("POST",), sleep),
    "/wake_up": (("POST",), wake_up),
    "/is_sleeping": (("GET",), is_sleeping),
    "/update_weights": (("POST",), update_weights),
    "/reset_prefix_cache": (("POST",), reset_prefix_cache),
    "/reset_mm_cache": (("POST",), reset_mm_cache),
    "/v1/load_lora_adapter": (("POST",), load_adapter),
    "/v1/unload_lora_adapter": (("POST",), unload_adapter),
    "/load": (("GET",), load),
    "/v1/media/encode": (("POST",), encode_media),
}
"""Path -> methods and endpoint."""
COMPUTING_PATHS = frozenset({"/v1/media/encode"})
"""Paths that use the engine: their requests count against `max_requests`, as those of clients do."""
