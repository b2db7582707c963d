"""/invocations, the path to which SageMaker sends all requests: the fields of the body choose the endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from ...callers.errors import InputError
from ..errors import validation_error
from ..model_facts import ModelFacts
from ..model_routes import on_model
from ..protocol.body import Body
from ..protocol.chat import ChatBody
from ..protocol.completions import CompletionBody
from ..protocol.pooling import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from ..state import services_of
from .chat import chat_completions
from .completions import completions
from .pooling import classify, embeddings, rerank, score

Target = tuple[type[Body], Callable[..., Awaitable[Response]]]
_BY_FIELD: Mapping[str, Target] = {
    "messages": (ChatBody, chat_completions),
    "prompt": (CompletionBody, completions),
    "input": (EmbeddingBody, embeddings),
    "query": (RerankBody, rerank),
    "queries": (ScoreBody, score),
    "text_1": (ScoreBody, score),
}
"""A field that only bodies of one endpoint have -> that endpoint."""
_CLASSIFY: Target = ClassifyBody, classify


async def invocations(body: dict[str, Any], request: Request) -> Response:
    """Answer as the endpoint does whose body this is; `input` is classified by a classification checkpoint, else embedded.

    Raises:
        InputError: the body has no field that tells the endpoint.
        RequestValidationError: it is no body of this endpoint.
    """
    field = next((name for name in _BY_FIELD if body.get(name) is not None), None)
    if field is None:
        reason = f"the body has no field that tells what to do; give one of {', '.join(_BY_FIELD)}"
        raise InputError(reason, code="invalid_value")
    kind, endpoint = _BY_FIELD[field]
    if field == "input" and _classifies(request, body.get("model")):
        kind, endpoint = _CLASSIFY
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        raise validation_error(error) from None
    has_one_model = services_of(request).pool.is_fixed
    return await (endpoint if has_one_model else on_model("/invocations", endpoint))(parsed, request)


def _classifies(request: Request, name: object) -> bool:
    """Return whether the model of this name is a classification checkpoint. Raise HttpError if several have none of it."""
    pool = services_of(request).pool
    pooled = pool.find(name if isinstance(name, str) and not pool.is_fixed else None)  # else the endpoint checks the name
    facts: ModelFacts = pooled.facts if pooled.model is None else pooled.model.facts
    return facts.classifies
