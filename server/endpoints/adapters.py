"""Endpoints that load and unload adapters, under vLLM's names. Like all that change a server, they need `admin_key`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from ...callers.errors import InputError, short_repr
from ..errors import HttpError
from ..model_pool import ModelPool
from ..pooled_model import PooledAdapter, PooledModel
from ..protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from ..state import Server, services_of


async def load_adapter(body: LoadAdapterBody, request: Request) -> Response:
    """Load an adapter's folder on the server; requests may then name it as their model.

    `load_inplace` replaces one of the same name: requests in progress keep the old one. Of several models, `model` names the
    one that it belongs to.
    """
    services = services_of(request)
    async with services.adapter_changes:
        pooled = services.pool.find(body.model)
        _check_name(services.pool, pooled, body)
        lease = await services.pool.acquire(pooled.name)
        try:
            await lease.model.llm.load_adapter(body.lora_name, body.lora_path, body.is_pinned)
            pooled.adapters[body.lora_name] = PooledAdapter(body.lora_path, body.is_pinned, was_added=True)
        finally:
            lease.release()
    return PlainTextResponse(f"Success: the adapter {body.lora_name} was loaded.")


def _check_name(pool: ModelPool[Server], pooled: PooledModel[Server], body: LoadAdapterBody) -> None:
    """Raise InputError if the name is taken."""
    name, owner = body.lora_name, pool.owner(body.lora_name)
    if owner is None:
        return
    if owner is not pooled or name in owner.names:
        reason = "is the name of another model or adapter; choose another one"
    elif not body.load_inplace:
        reason = "is loaded already; set load_inplace to replace it"
    else:
        return
    raise InputError(f"<<param=>>{short_repr(name)} {reason}", code="invalid_value", param="lora_name", value=name)


async def unload_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    """Forget an adapter. Requests in progress keep it."""
    services, name = services_of(request), body.lora_name
    async with services.adapter_changes:
        owner = services.pool.owner(name)
        if owner is None or name not in owner.adapters:
            raise HttpError(404, f"there is no adapter {short_repr(name)}", "model_not_found", "lora_name")
        del owner.adapters[name]
        while owner.task is not None:  # which may load the adapter
            await asyncio.wait({owner.task})
        if owner.model is not None:
            with suppress(InputError):  # the engine does not have it
                await owner.model.llm.unload_adapter(name)
    return PlainTextResponse(f"Success: the adapter {name} was unloaded.")
