"""/v1/embeddings, /score, /rerank and /classify."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import InputError
from ...engine.pooling_params import PoolingParams
from ...pipelines.embed import Embedding
from ...pipelines.pooling import PooledResult
from ..inputs import read_input, read_inputs
from ..protocol.pooling import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from ..state import Server, cache_salt, new_id, priority_of, server_of, unless_disconnected

MAX_NUMBERS = 1 << 24
"""Numbers of one response of /v1/embeddings: about 350 MB of JSON, or 90 MB of base64."""


async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Embed texts, token ids or media."""
    server = server_of(request)
    results = await embedded(body, request)
    head = {"object": "list", "model": _model_name(server, body), "usage": _usage(results)}
    written = asyncio.to_thread(_serialise, head, results, body.encoding_format == "base64")
    return Response(await unless_disconnected(request, written), media_type="application/json")


async def embedded(body: EmbeddingBody, request: Request) -> Sequence[Embedding]:
    """Return the vectors that a request to /v1/embeddings asks for. Raise InputError if one cannot be computed."""
    server = server_of(request)
    inputs = read_inputs(body.input, "input")
    _check_size(server, body, inputs)
    shape = {"dimensions": body.dimensions, "pooling": body.pooling}
    options = _options(body, request) | {name: value for name, value in shape.items() if value is not None}
    work = server.llm.embed(inputs, priority=priority_of(request), **options)
    results = _checked(await unless_disconnected(request, work), "input")
    _check_numbers(sum(result.vector.numel() for result in results))
    return results


def _check_size(server: Server, body: EmbeddingBody, inputs: Sequence[Any]) -> None:
    """Raise InputError for vectors of tokens if the model is not made for these, or if the response would be too large.

    Only inputs of token ids have known lengths here; each other input counts as one token.
    """
    engine = server.engine
    pooling = body.pooling or engine.info.pooling
    size = engine.embedding_size(pooling)
    if body.pooling == "tokens" and engine.info.pooling != "tokens" and size == engine.embedding_size():
        reason = 'pooling="tokens" is for late-interaction models, which this model is not; give "last", "mean" or another one'
        raise InputError(reason, code="unsupported", param="pooling")
    tokens = [len(item.get("prompt_token_ids", "1")) if isinstance(item, dict) else 1 for item in inputs]
    dimensions = body.dimensions
    if dimensions is None and pooling != "tokens" and engine.sentence_transformers is not None:
        dimensions = engine.sentence_transformers.truncate_dim
    width = size if dimensions is None else min(size, max(1, dimensions))
    _check_numbers(width * (sum(tokens) if pooling == "tokens" else len(inputs)))


def _check_numbers(count: int) -> None:
    if count > MAX_NUMBERS:
        reason = f"the vectors have {count:,} numbers, above the limit of {MAX_NUMBERS:,} for one response"
        raise InputError(f"{reason}; send fewer or shorter inputs, or lower dimensions", param="input")


def _serialise(head: dict[str, Any], results: Sequence[Embedding], as_base64: bool) -> bytes:
    """Return the JSON of a list of embeddings, encoded row by row, so that other threads run in between."""
    parts = [json.dumps(head)[:-1], ', "data": [']
    for index, result in enumerate(results):
        vector = result.vector
        assert vector is not None  # failed results were reported
        fields = {"object": "embedding", "index": index, **_truncated(result)}
        parts.append(f'{", " if index else ""}{json.dumps(fields)[:-1]}, "embedding": ')
        if as_base64:
            coded = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
            parts.append(f'"{coded}", "shape": {list(vector.shape)}}}')
            continue
        rows = ", ".join(json.dumps(row.tolist(), allow_nan=False) for row in torch.atleast_2d(vector))
        parts.append(f"[{rows}]}}" if vector.ndim > 1 else f"{rows}}}")
    return "".join([*parts, "]}"]).encode()


async def score(body: ScoreBody, request: Request) -> Response:
    """Score pairs of a query and a document, or one query with several documents."""
    server = server_of(request)
    queries = _either(body.queries, body.text_1, "queries", "text_1")
    documents = _either(body.documents, body.text_2, "documents", "text_2")
    query = read_inputs(queries, "queries")
    work = server.llm.score(query, read_inputs(documents, "documents"), **_options(body, request))
    results = _checked(await unless_disconnected(request, work), "documents")
    scores = enumerate(results)
    data = [{"index": index, "object": "score", "score": result.score, **_truncated(result)} for index, result in scores]
    return JSONResponse(_list(_model_name(server, body), "score", data, results))


async def rerank(body: RerankBody, request: Request) -> Response:
    """Rank documents by how well they answer a query."""
    server = server_of(request)
    if body.top_n is not None and body.top_n < 0:
        raise InputError(f"<<param=>>{body.top_n} must be 0 (all) or above", code="invalid_value", param="top_n")
    documents = read_inputs(body.documents, "documents")
    work = server.llm.score(read_input(body.query, "query"), documents, **_options(body, request))
    results = _checked(await unless_disconnected(request, work), "documents")
    scores = [0.0 if result.score is None else result.score for result in results]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    entries = []
    for index in ranked:
        document = body.documents[index]
        returned = (
            {}
            if body.return_documents is False
            else {"document": {"text": document} if isinstance(document, str) else document}
        )
        entries.append({"index": index, **returned, "relevance_score": scores[index], **_truncated(results[index])})
    return JSONResponse(
        {"id": new_id("rerank-"), "model": _model_name(server, body), "usage": _usage(results), "results": entries}
    )


async def classify(body: ClassifyBody, request: Request) -> Response:
    """Return the probabilities of a classification checkpoint's classes."""
    server = server_of(request)
    salt = cache_salt(request, body.cache_salt)
    prompts = [{"prompt": item} if isinstance(item, str) else item for item in read_inputs(body.input, "input")]
    salted = prompts if salt is None else [{**prompt, "cache_salt": salt} for prompt in prompts]
    params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=body.truncation_side)
    work = server.llm.classify(salted, params, adapter=server.adapter_of(body.model))
    results = _checked(await unless_disconnected(request, work), "input")
    data = []
    for index, result in enumerate(results):
        probs = result.outputs.probs
        best = max(range(len(probs)), key=probs.__getitem__)
        label = server.labels.get(str(best), str(best))
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs), **_truncated(result)})
    return JSONResponse(_list(_model_name(server, body), "classify", data, results))


def _model_name(server: Server, body: EmbeddingBody | ScoreBody | RerankBody | ClassifyBody) -> str:
    """Return the model of a response: the adapter, if the request names one."""
    return server.adapter_of(body.model) or server.name


def _options(body: EmbeddingBody | ScoreBody | RerankBody, request: Request) -> dict[str, Any]:
    options = {
        "adapter": server_of(request).adapter_of(body.model),
        "instruction": body.instruction,
        "cache_salt": cache_salt(request, body.cache_salt),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "truncation_side": body.truncation_side,
    }
    return {name: value for name, value in options.items() if value is not None}


def _either(first: Any, second: Any, name: str, other: str) -> Any:
    if (first is None) == (second is None):
        raise InputError(f"give either <<param>> or {other}", param=name)
    return second if first is None else first


def _checked(results: Sequence[Any], param: str) -> Sequence[Any]:
    """Return results. Raise the first error, with the number of its input."""
    for index, result in enumerate(results):
        if result.error is not None:
            info = result.error
            raise InputError(f"{param}[{index}]: {info.without_item().text}", code=info.code, param=f"{param}[{index}]")
    return results


def _list(model: str, kind: str, data: Sequence[Any], results: Sequence[PooledResult]) -> dict[str, Any]:
    head = {"id": new_id(f"{kind}-"), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": _usage(results)}


def _truncated(result: PooledResult) -> dict[str, bool]:
    """Return a field for a result whose prompt was cut."""
    return {"truncated": True} if result.truncated else {}


def _usage(results: Sequence[PooledResult]) -> dict[str, int]:
    tokens = sum(len(result.prompt_token_ids) for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
