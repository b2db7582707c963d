"""Ollama's /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import naming_field
from ...pipelines.embed import Embedding
from ..protocol.ollama import LATEST, EmbedBody, EmbeddingsBody
from ..protocol.pooling import EmbeddingBody
from .pooling import embedded


async def embed(body: EmbedBody, request: Request) -> Response:
    """Embed one text or several. A text that is too long is cut, unless the request says otherwise."""
    started, cut = time.monotonic_ns(), None if body.truncate is False else -1
    results = await _embed(request, body.model, body.input, "input", cut, body.dimensions)
    return JSONResponse(
        {
            "model": body.model,
            "embeddings": [_numbers(result) for result in results],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": sum(len(result.prompt_token_ids) for result in results),
        }
    )


async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Embed one text."""
    (result,) = await _embed(request, body.model, body.prompt, "prompt", -1, None)
    return JSONResponse({"embedding": _numbers(result)})


async def _embed(
    request: Request, model: str, texts: str | list[str], field: str, cut: int | None, dimensions: int | None
) -> Sequence[Embedding]:
    same = EmbeddingBody(model=model.removesuffix(LATEST), input=texts, truncate_prompt_tokens=cut, dimensions=dimensions)
    with naming_field("input", field):
        return await embedded(same, request)


def _numbers(result: Embedding) -> list[Any]:
    assert result.vector is not None  # failed results were reported
    numbers: list[Any] = result.vector.tolist()
    return numbers
