"""Endpoints that load and unload adapters, under vLLM's names. Like all that change a server, they need `admin_key`."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response

from ...callers.errors import InputError, short_repr
from ..errors import HttpError
from ..protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from ..state import services_of


async def load_adapter(body: LoadAdapterBody, request: Request) -> Response:
    """Load an adapter's folder on the server; requests may then name it as their model.

    `load_inplace` replaces one of the same name: requests in progress keep the old one. Of several models, `model` names the
    one that it belongs to.
    """
    pool = services_of(request).pool
    pooled = pool.find(body.model)
    name, owner = body.lora_name, pool.owner(body.lora_name)
    if owner is not None and (owner is not pooled or name in owner.names):
        raise InputError(f"<<param=>>{short_repr(name)} is the name of another model or adapter; choose another one",
                         code="invalid_value", param="lora_name", value=name)  # fmt: skip
    if owner is not None and not body.load_inplace:
        raise InputError(f"<<param=>>{short_repr(name)} is loaded already; set load_inplace to replace it",
                         code="invalid_value", param="lora_name", value=name)  # fmt: skip
    lease = await pool.acquire(pooled.name)
    try:
        await lease.model.llm.load_adapter(name, body.lora_path, body.is_pinned)
        pooled.adapters[name] = body.lora_path
    finally:
        lease.release()
    return PlainTextResponse(f"Success: the adapter {name} was loaded.")


async def unload_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    """Forget an adapter. Requests in progress keep it."""
    pool = services_of(request).pool
    owner = pool.owner(body.lora_name)
    if owner is None or body.lora_name not in owner.adapters:
        raise HttpError(404, f"there is no adapter {short_repr(body.lora_name)}", "model_not_found", "lora_name")
    del owner.adapters[body.lora_name]
    if owner.model is not None:
        await owner.model.llm.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: the adapter {body.lora_name} was unloaded.")
