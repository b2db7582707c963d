"""Bodies about tokens and plans."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from .body import Body, Many


class TokenizeBody(Body):
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = Field(None, min_length=1)
    tools: Many[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    cache_salt: str | None = None


class DetokenizeBody(Body):
    tokens: Many[int]


class PlanBody(Body):
    messages: Many[dict[str, Any]] = Field(min_length=1)
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
