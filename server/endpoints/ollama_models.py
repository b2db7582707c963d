"""Ollama's /api/tags, /api/ps, /api/show and /api/version. Source of the answers: the types of the `ollama` package."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine.model_files import load_model_files
from ..model_facts import ModelFacts
from ..pooled_model import PooledModel
from ..protocol.ollama import LATEST, ShowBody
from ..state import Server, Services, services_of

_API_VERSION = "0.13.0"
"""The version of Ollama with these fields: clients refuse a server that is older than they need."""
_NEVER = "9999-12-31T23:59:59Z"
_WEIGHTS = (".safetensors", ".gguf", ".bin")


async def version() -> Response:
    return JSONResponse({"version": _API_VERSION})


async def tags(request: Request) -> Response:
    """List the models."""
    services = services_of(request)
    return JSONResponse({"models": [_model(services, pooled) for pooled in services.pool.models]})


async def running(request: Request) -> Response:
    """List the loaded models, without those that sleep."""
    services, models = services_of(request), []
    for pooled in services.pool.models:
        if pooled.model is not None and not pooled.model.engine.asleep:
            entry, engine = _model(services, pooled), pooled.model.engine
            on_gpu = entry["size"] if engine.info.device != "cpu" else 0
            loaded = {"expires_at": _NEVER, "size_vram": on_gpu, "context_length": engine.max_model_len}
            models.append({**entry, **loaded})
    return JSONResponse({"models": models})


async def show(body: ShowBody, request: Request) -> Response:
    """Describe a model. It is not loaded for that."""
    services = services_of(request)
    facts = _facts(services.pool.find(body.model.removesuffix(LATEST)))
    family = facts.architecture
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "",
            "template": facts.chat_template,
            "details": _details(facts),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": facts.max_model_len,
                f"{family}.embedding_length": facts.hidden_size,
            },
            "capabilities": facts.ollama_capabilities,
            "modified_at": _time(services),
        }
    )


def _facts(pooled: PooledModel[Server]) -> ModelFacts:
    facts: ModelFacts = pooled.facts if pooled.model is None else pooled.model.facts
    return facts


def _model(services: Services, pooled: PooledModel[Server]) -> dict[str, Any]:
    facts = _facts(pooled)
    identity = pooled.name, load_model_files(facts.path).config
    return {
        "name": pooled.name,
        "model": pooled.name,
        "modified_at": _time(services),
        "size": _size(facts.path),
        "digest": sha256(repr(identity).encode("utf-8", "surrogatepass")).hexdigest(),
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if facts.path.suffix == ".gguf" else "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": "",
        "quantization_level": facts.dtype,
    }


def _size(path: Path) -> int:
    """Return the bytes of the checkpoint's files of weights."""
    files = [path] if path.is_file() else path.glob("*") if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS)


def _time(services: Services) -> str:
    return datetime.fromtimestamp(services.created, UTC).isoformat()
