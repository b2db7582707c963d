"""/tokenize, /detokenize and /v1/media/plan. They run in threads, because texts may be long and media may be downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import InputError, check_utf8
from ...mm.media.isolate import Interrupt
from ..guard import TENANT
from ..protocol.tokens import DetokenizeBody, PlanBody, TokenizeBody
from ..protocol.tools import as_template_messages, read_tools
from ..shared_threads import SharedThreads
from ..state import cache_salt, server_of, services_of, unless_disconnected
from ..uploaded_files import with_files

T = TypeVar("T")


async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text, or of the prompt of a conversation with those of its media."""
    server = server_of(request)
    server.adapter_of(body.model)
    engine = server.engine
    tokenizer = engine.tokenizer
    salt = cache_salt(request, body.cache_salt)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("give either prompt or messages", param="prompt")
    body.messages = await with_files(request, body.messages or (), "messages")
    messages = server.checked_messages(as_template_messages(body.messages))
    tools = [tool.shown for tool in read_tools(body.tools or ())]
    limit = tokenizer.max_characters(engine.max_model_len)

    def run() -> Sequence[int]:
        if body.prompt is not None:
            if len(body.prompt) > limit:
                reason = f"<<param>> has more than {limit} characters; shorten it"
                raise InputError(reason, code="too_long", param="prompt", limit=limit, value=len(body.prompt))
            return tokenizer.encode(check_utf8(body.prompt), add_special_tokens=body.add_special_tokens)
        options = {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "tools": tools or None,
            "chat_template_kwargs": body.chat_template_kwargs,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "cache_salt": salt,
        }
        chat_options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return engine.tokenize(messages, max_tokens=limit, **chat_options)

    def with_texts() -> tuple[Sequence[int], list[str] | None]:
        tokens = run()
        if not body.return_token_strs:
            return tokens, None
        return tokens, [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    if _holds_media(messages):
        tokens, texts = await run_planner(request, with_texts)
    else:
        tokens, texts = await _in_thread(request, services_of(request).tokenisers, with_texts)
    content = {"tokens": [*tokens], "count": len(tokens), "max_model_len": engine.max_model_len, "token_strs": texts}
    return JSONResponse(content)


async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    server.adapter_of(body.model)
    tokenizer = server.engine.tokenizer
    if wrong := next((token for token in body.tokens if not 0 <= token < tokenizer.vocab_size), None):
        reason = f"tokens holds {wrong}; the vocabulary has the ids 0 to {tokenizer.vocab_size - 1}"
        raise InputError(reason, param="tokens")
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": await _in_thread(request, services_of(request).tokenisers, decode)})


async def media_plan(body: PlanBody, request: Request) -> Response:
    """Return tokens, rows and bytes of the media of a conversation from their headers. Nothing is decoded."""
    server = server_of(request)
    server.adapter_of(body.model)
    messages = server.checked_messages(as_template_messages(body.messages))
    salt = cache_salt(request, body.cache_salt)
    plan = partial(server.engine.plan, messages, body.mm_processor_kwargs, cache_salt=salt)
    items = [asdict(item) for item in await run_planner(request, plan)]
    tokens = sum(item["num_tokens"] for item in items)
    return JSONResponse({"object": "media.plan", "model": server.name, "items": items, "num_tokens": tokens})


def _holds_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has parts other than text, such as a PDF, which is opened to count its pages."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


async def run_planner(request: Request, work: Callable[[], T]) -> T:
    """Return the result of work that may download media or open PDFs; see `run_interruptible`."""
    return await run_interruptible(request, services_of(request).planners, work)


async def run_interruptible(request: Request, threads: SharedThreads, work: Callable[[], T]) -> T:
    """Return the result of work. If the client disconnects or the request is cancelled, its downloads and workers end."""
    interrupt = Interrupt()
    try:
        return await _in_thread(request, threads, partial(interrupt.run, work))
    finally:
        interrupt.stop()


async def _in_thread(request: Request, threads: SharedThreads, work: Callable[[], T]) -> T:
    """Return the result of work unless the client disconnects."""
    return await unless_disconnected(request, threads.run(request.scope[TENANT], work))
