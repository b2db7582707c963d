"""/tokenize, /detokenize and /v1/media/plan. They run in threads, because texts may be long and media may be downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...mm.errors import InputError, check_utf8
from ...mm.media.isolate import Interrupt
from ..guard import TENANT
from ..protocol.messages import read_functions
from ..protocol.tokens import DetokenizeBody, PlanBody, TokenizeBody
from ..shared_threads import SharedThreads
from ..state import cache_salt, server_of, unless_disconnected

T = TypeVar("T")


async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text or of a conversation, whose media are one placeholder each."""
    server = server_of(request)
    server.check_model(body.model)
    llm = server.engine.llm
    tokenizer = llm.get_tokenizer()
    salt = cache_salt(request, body.cache_salt)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give prompt or messages, one of them", param="prompt")
    server.check_messages(body.messages or ())
    read_functions(body.tools or ())

    def run() -> list[int]:
        if body.messages is None:
            text = body.prompt or ""
            limit = tokenizer.max_characters(llm.max_model_len)
            if len(text) > limit:
                raise InputError(f"prompt has more than {limit} characters; shorten it", code="too_long", param="prompt")
            return tokenizer.encode(check_utf8(text), add_special_tokens=body.add_special_tokens)
        how: dict[str, Any] = {"continue_final_message": body.continue_final_message, "max_model_len": llm.max_model_len}
        how |= {"policy": llm.config.media, "cache_salt": salt}
        generates = body.add_generation_prompt and not body.continue_final_message
        found: list[int] = tokenizer.apply_chat_template(body.messages, body.tools, add_generation_prompt=generates, **how)
        return found

    def with_texts() -> tuple[list[int], list[str] | None]:
        tokens = run()
        if not body.return_token_strs:
            return tokens, None
        return tokens, [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    if _holds_media(body.messages or ()):
        tokens, texts = await _plan(request, with_texts)
    else:
        tokens, texts = await _in_thread(request, server.tokenisers, with_texts)
    found = {"tokens": tokens, "count": len(tokens), "max_model_len": llm.max_model_len, "token_strs": texts}
    return JSONResponse(found)


async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    server.check_model(body.model)
    tokenizer = server.engine.llm.get_tokenizer()
    if wrong := next((token for token in body.tokens if not 0 <= token < tokenizer.vocab_size), None):
        reason = f"tokens holds {wrong}; the vocabulary has the ids 0 to {tokenizer.vocab_size - 1}"
        raise InputError(reason, param="tokens")
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": await _in_thread(request, server.tokenisers, decode)})


async def media_plan(body: PlanBody, request: Request) -> Response:
    """Return tokens, rows and bytes of the media of a conversation from their headers. Nothing is decoded."""
    server = server_of(request)
    server.check_model(body.model)
    server.check_messages(body.messages)
    salt = cache_salt(request, body.cache_salt)
    plan = partial(server.engine.llm.plan, body.messages, body.mm_processor_kwargs, cache_salt=salt)
    items = [asdict(item) for item in await _plan(request, plan)]
    tokens = sum(item["num_tokens"] for item in items)
    return JSONResponse({"object": "media.plan", "model": server.name, "items": items, "num_tokens": tokens})


def _holds_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has parts other than text, such as a PDF, which is opened to count its pages."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


async def _plan(request: Request, work: Callable[[], T]) -> T:
    """Return the result of work that may download media or open PDFs. If the client disconnects, both end."""
    interrupt = Interrupt()
    try:
        return await _in_thread(request, server_of(request).planners, partial(interrupt.run, work))
    finally:
        interrupt.stop()


async def _in_thread(request: Request, threads: SharedThreads, work: Callable[[], T]) -> T:
    """Return the result of work unless the client disconnects."""
    return await unless_disconnected(request, threads.run(request.scope[TENANT], work))
