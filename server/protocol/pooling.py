"""Bodies of embeddings, scores, ranks and classes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from .body import Body, Many, Refused

_OWNER: Refused = {
    "chat_template": ((), "the server's chat template is used; start it with --chat-template"),
    "priority": ((0,), "requests run in order of arrival"),
}


class _Truncating(Body):
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


class EmbeddingBody(_Truncating):
    refused: ClassVar[Refused] = _OWNER
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None
    instruction: str | None = None
    cache_salt: str | None = None


class ScoreBody(_Truncating):
    refused: ClassVar[Refused] = _OWNER
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    instruction: str | None = None
    cache_salt: str | None = None


class RerankBody(_Truncating):
    refused: ClassVar[Refused] = _OWNER
    query: Any
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    cache_salt: str | None = None


class ClassifyBody(_Truncating):
    refused: ClassVar[Refused] = _OWNER
    input: str | Many[str] | Many[int] | Many[Many[int]]
    cache_salt: str | None = None
