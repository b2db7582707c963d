"""Ollama's /api/chat and /api/generate. Source of the answers: the types of the `ollama` package."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine.outputs import CompletionOutput, RequestOutput
from ..errors import naming_places
from ..events import json_lines
from ..protocol.messages import as_input
from ..protocol.ollama import AnswerBody, GenerateBody, OllamaChatBody
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected
from .answer_writer import AnswerWriter, Event, Kind
from .chat import Chat


async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(body, request, is_empty=not body.messages)


async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt."""
    return await _answer(body, request, is_empty=not body.prompt and not body.images)


async def _answer(body: OllamaChatBody | GenerateBody, request: Request, is_empty: bool) -> Response:
    server = server_of(request)
    server.adapter_of(body.served_model)
    if is_empty:  # clients load a model with it
        return JSONResponse({**_head(body), **_message(body, ""), "done": True, "done_reason": "load"})
    chat_body, places = body.chat_body()
    with naming_places(places):
        writer = OllamaWriter(server, body, Chat(server, chat_body, new_id("ollama-")))
        outputs = writer.outputs(cache_salt(request, None), priority_of(request))
        first = checked(await unless_disconnected(request, first_output(outputs)))
    if body.streams:
        return json_lines(writer.stream(first, outputs))
    return JSONResponse(await unless_disconnected(request, writer.whole(first, outputs)))


class OllamaWriter(AnswerWriter):
    """One answer: writes its chunks."""

    def __init__(self, server: Server, body: AnswerBody, chat: Chat) -> None:
        super().__init__(chat)
        self._server, self._body = server, body
        self._name = ""  # of the tool that is called
        self._arguments: list[str] = []
        self._times = [time.perf_counter_ns()]  # of the request and of the first output

    def outputs(self, salt: str | None, priority: int) -> AsyncGenerator[RequestOutput, None]:
        """Start the request."""
        chat, body = self._chat, self._body
        prompt: Any = chat.messages
        options = chat.options(salt)
        if isinstance(body, GenerateBody) and body.raw:
            prompt = {"prompt": body.prompt} | ({} if salt is None else {"cache_salt": salt})
            options = {} if chat.adapter is None else {"adapter": chat.adapter}
        return self._server.llm.generate(prompt, chat.params, chat.id, "delta", priority, **options)

    async def whole(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> dict[str, Any]:
        """Return the whole answer."""
        chunks = [chunk async for chunk in self.stream(output, outputs)]
        answer = dict(chunks[-1])
        texts = ("response", "thinking") if isinstance(self._body, GenerateBody) else ("content", "thinking")
        messages = [chunk.get("message", chunk) for chunk in chunks]
        joined: dict[str, Any] = {name: "".join(message.get(name, "") for message in messages) for name in texts}
        joined["tool_calls"] = [call for message in messages for call in message.get("tool_calls", ())]
        present = {name: value for name, value in joined.items() if value or name == texts[0]}
        answer |= present if isinstance(self._body, GenerateBody) else {"message": {"role": "assistant", **present}}
        if self._body.logprobs:
            answer["logprobs"] = [entry for chunk in chunks for entry in chunk.get("logprobs", ())]
        return answer

    async def stream(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the chunks of a stream."""
        async with aclosing(self._events(output, outputs)) as events:
            async for event in events:
                yield event

    def _begin(self, output: RequestOutput) -> Iterator[Event]:
        self._times.append(time.perf_counter_ns())
        yield from ()

    def _open(self, kind: Kind, name: str) -> Iterator[Event]:
        self._name, self._arguments = name, []
        yield from ()

    def _delta(self, text: str) -> Iterator[Event]:
        if self._kind == "message":
            logprobs, self._unsent = self._chat.token_logprobs(self._unsent), []
            yield self._chunk(text, **({"logprobs": logprobs} if logprobs else {}))
        elif self._kind != "reasoning":
            self._arguments.append(text)
        elif self._chat.body.include_reasoning is not False:
            yield self._chunk("", thinking=text)

    def _close(self, is_cut: bool) -> Iterator[Event]:
        if self._name:
            call = {"name": self._name, "arguments": as_input("".join(self._arguments))}
            yield self._chunk("", tool_calls=[{"function": call}])
        self._kind, self._name = None, ""

    def _end(self, output: RequestOutput, answer: CompletionOutput, is_cut: bool) -> Iterator[Event]:
        yield from self._close(is_cut)
        start, first, end = *self._times, time.perf_counter_ns()
        yield {
            **self._chunk(""),
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": end - start,
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": first - start,
            "eval_count": len(self._token_ids),
            "eval_duration": end - first,
        }

    def _chunk(self, text: str, logprobs: list[dict[str, Any]] | None = None, **fields: Any) -> Event:
        chunk = {**_head(self._body), **_message(self._body, text, **fields), "done": False}
        return chunk if logprobs is None else {**chunk, "logprobs": logprobs}


def _head(body: AnswerBody) -> dict[str, Any]:
    return {"model": body.model, "created_at": datetime.now(UTC).isoformat()}


def _message(body: AnswerBody, text: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an answer's text: /api/generate has them beside the others."""
    if isinstance(body, GenerateBody):
        return {"response": text, **fields}
    return {"message": {"role": "assistant", "content": text, **fields}}
