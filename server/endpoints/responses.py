"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ...callers.errors import ErrorInfo, SensoriumError, naming_field
from ...engine.outputs import CompletionOutput, RequestOutput
from ..access_log import background_record
from ..errors import error_body, naming_places
from ..events import STREAM_HEADERS
from ..guard import HELD_BYTES
from ..outputs import draft_details, usage
from ..protocol.chat import ChatBody
from ..protocol.response_input import new_item_id
from ..protocol.responses import REASONING, InputTokensBody, ResponsesBody
from ..request_record import stream_error
from ..state import Server, cache_salt, checked, first_output, keep_model, new_id, priority_of, server_of, unless_disconnected
from ..streams import open_stream
from .answer_writer import AnswerWriter, Event, Kind
from .chat import Chat
from .stored_responses import Keeper, keeper, with_history
from .tokens import run_planner


async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer an input of messages, tool calls and their outputs, after those of the previous response."""
    keep = await keeper(request, body)
    full_body, places = await with_history(request, body)
    if body.background:
        assert keep is not None
        with naming_places(places):
            return await _respond_in_background(full_body, request, keep)
    *starts, last = full_body.starts
    with naming_places(places):
        for start in starts:
            try:
                return await _respond(full_body, request, start, keep)
            except SensoriumError as error:
                if error.info.code != "too_long":
                    raise
        return await _respond(full_body, request, last, keep)


async def input_tokens(body: InputTokensBody, request: Request) -> Response:
    """Return the tokens of the prompt that the same request to /v1/responses would have."""
    server = server_of(request)
    full_body, places = await with_history(request, body)
    chat_body, inner = full_body.chat_body(server.services.reasoning_signer)
    with naming_places(places), naming_places(inner):
        chat = Chat(server, chat_body)
        if full_body.prompt_token_ids is not None:
            count = len(full_body.prompt_token_ids)
        else:
            options = chat.options(cache_salt(request, body.cache_salt))
            count = await run_planner(request, partial(server.engine.count_tokens, chat.messages, **options))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


async def _respond(body: ResponsesBody, request: Request, start: int, keep: Keeper | None) -> Response:
    """Answer the input from this item on."""
    server = server_of(request)
    chat_body, places = body.chat_body(server.services.reasoning_signer, start)
    with naming_places(places):
        answer = ResponseWriter(server, body, chat_body, keep)
        format_field = chat_body.format_field
        with naming_field("structured_outputs", "text.format" if format_field == "response_format" else format_field):
            outputs = answer.outputs(cache_salt(request, body.cache_salt), priority_of(request, body.priority))
            if body.stream:
                return await open_stream(
                    request, outputs, lambda first: answer.stream(checked(first), outputs), with_done=False
                )
            first = checked(await unless_disconnected(request, first_output(outputs)))
        return JSONResponse(await unless_disconnected(request, answer.whole(first, outputs)))


async def _respond_in_background(body: ResponsesBody, request: Request, keep: Keeper) -> Response:
    """Queue a response, and return it or the stream of its events."""
    server = server_of(request)
    writer = _background_writer(body, server, keep, new_id("resp_"))  # an error of a field is an error of the request
    response = writer.response("queued")
    attempts = partial(_background_writer, body, server, keep, response["id"])
    events = _background_events(body, attempts, cache_salt(request, body.cache_salt), priority_of(request, body.priority))
    size, streams = request.scope[HELD_BYTES], bool(body.stream)
    record, background = background_record(request.scope), server.services.background
    running = await background.start(response, events, keep, keeps_events=streams, size=size, record=record)
    release = keep_model(request)
    running.task.add_done_callback(lambda _: release())
    request.scope[HELD_BYTES] = 0
    if not body.stream:
        return JSONResponse(response)
    return StreamingResponse(running.follow(-1), media_type="text/event-stream", headers=STREAM_HEADERS)


def _background_writer(body: ResponsesBody, server: Server, keep: Keeper, response_id: str, start: int = 0) -> ResponseWriter:
    chat_body, places = body.chat_body(server.services.reasoning_signer, start)
    with naming_places(places):
        return ResponseWriter(server, body, chat_body, keep, response_id)


async def _background_events(
    body: ResponsesBody, attempt: Callable[[int], ResponseWriter], salt: str | None, priority: int
) -> AsyncGenerator[Event, None]:
    """Yield the events of a response in the background from "in_progress" on. An error becomes its last event."""
    *starts, last = body.starts
    for start in (*starts, last):
        writer = attempt(start)
        try:
            outputs = writer.outputs(salt, priority)
            first = checked(await first_output(outputs))
        except Exception as error:
            info = stream_error(error)
            if info.code != "too_long" or start == last:
                yield writer.failed(info)
                return
        else:
            async with aclosing(writer.stream(first, outputs)) as events:
                async for event in events:
                    yield event
            return


class ResponseWriter(AnswerWriter):
    """One response: writes the events of its stream, and keeps the items of its output."""

    def __init__(
        self,
        server: Server,
        body: ResponsesBody,
        chat_body: ChatBody,
        keep: Keeper | None = None,
        response_id: str | None = None,
    ) -> None:
        super().__init__(Chat(server, chat_body, response_id or new_id("resp_")))
        self._server, self._body, self._keep = server, body, keep
        self._output: list[dict[str, Any]] = []  # finished items
        self._item: dict[str, Any] = {}  # the open item
        self._texts: list[str] = []  # of the open item
        self._sequence = 0
        self._logprobs: list[dict[str, Any]] = []  # of the open item

    def outputs(self, salt: str | None, priority: int) -> AsyncGenerator[RequestOutput, None]:
        """Start the request."""
        chat = self._chat
        kind = "delta" if self._body.stream or self.needs_deltas else "final"
        prompt: Any = chat.messages
        options = chat.options(salt)
        if self._body.prompt_token_ids is not None:
            kept = ("cache_salt", "mm_processor_kwargs")
            adapter = {} if chat.adapter is None else {"adapter": chat.adapter}
            prompt = {"prompt_token_ids": self._body.prompt_token_ids} | {key: options[key] for key in kept if key in options}
            options = adapter
        return self._server.llm.generate(prompt, chat.params, chat.id, kind, priority, **options)

    async def whole(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> dict[str, Any]:
        """Return the whole response."""
        async with aclosing(self._stored(output, outputs)) as events:
            response: dict[str, Any] = [event async for event in events][-1]["response"]
        return response

    async def _stored(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer, and store the response before its last event."""
        async with aclosing(self._events(output, outputs)) as events:
            async for event in events:
                if self._keep is not None and not self._body.background and event["type"] in _LAST:
                    await self._keep.add(event["response"])
                yield event

    async def stream(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream. An error becomes its last event."""
        async with aclosing(self._stored(output, outputs)) as events:
            try:
                async for event in events:
                    yield event
            except Exception as error:
                yield self.failed(stream_error(error))

    def failed(self, info: ErrorInfo) -> Event:
        """Return the last event of a response that has failed."""
        status, body = error_body(info)
        code = "server_error" if status >= 500 else "rate_limit_exceeded" if status == 429 else "invalid_prompt"
        reason = {"code": code, "message": body["error"]["message"]}
        return self._event("failed", response=self.response("failed", error=reason))

    def _begin(self, output: RequestOutput) -> Iterator[Event]:
        for kind in ("in_progress",) if self._body.background else ("created", "in_progress"):
            yield self._event(kind, response=self.response("in_progress"))

    def _end(self, output: RequestOutput, answer: CompletionOutput, is_cut: bool) -> Iterator[Event]:
        if not self._output and self._kind is None:
            yield from self._start("message")
            yield from self._delta("")
        yield from self._close(is_cut)
        if is_cut:
            response = self.response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            response = self.response("completed", completed_at=int(time.time()))
        if self._body.return_token_ids:
            response |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": self._token_ids}
        yield self._event(response["status"], response={**response, "usage": self._usage(output)})

    def _open(self, kind: Kind, name: str) -> Iterator[Event]:
        call = {"call_id": new_id("call_"), "name": name, _CALLS[kind]: ""} if kind in _CALLS else {}
        self._item = {"id": new_item_id(kind), "type": kind, **_FIELDS[kind], "status": "in_progress", **call}
        yield self._event("output_item.added", output_index=len(self._output), item=dict(self._item))
        if kind not in _CALLS:
            yield self._event("content_part.added", **self._location, content_index=0, part=self._part(""))

    def _delta(self, text: str) -> Iterator[Event]:
        kind, fields = self._kind or "", dict(self._location)
        self._texts.append(text)
        if kind == "message":
            logprobs, self._unsent = self._chat.token_logprobs(self._unsent), []
            self._logprobs += logprobs
            fields["logprobs"] = logprobs
        if text:
            yield self._event(f"{_DELTAS[kind]}.delta", **fields, **_index(kind), delta=text)

    def _close(self, is_cut: bool) -> Iterator[Event]:
        if self._kind is None:
            return
        kind, text, location = self._kind, "".join(self._texts), self._location
        if kind in _CALLS:
            self._item[_CALLS[kind]] = text
            named = {"name": self._item["name"]} if kind == "function_call" else {}
            yield self._event(f"{_DELTAS[kind]}.done", **location, **named, **{_CALLS[kind]: text})
        else:
            part = self._part(text)
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._event(f"{_DELTAS[kind]}.done", **location, **_index(kind), text=text, **logprobs)
            yield self._event("content_part.done", **location, **_index(kind), part=part)
            self._item["content"] = [part]
            if kind == "reasoning" and REASONING in (self._body.include or ()):
                self._item["encrypted_content"] = self._server.services.reasoning_signer.sign(text)
        self._item["status"] = "incomplete" if is_cut else "completed"
        yield self._event("output_item.done", output_index=len(self._output), item=self._item)
        self._output.append(self._item)
        self._kind, self._item, self._texts, self._logprobs = None, {}, [], []

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    @property
    def _location(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self._sequence - 1, **fields}

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the response with the items that are finished."""
        body, params = self._body, self._chat.params
        return {
            "id": self._chat.id,
            "object": "response",
            "created_at": self._chat.created,
            "status": status,
            "background": bool(self._body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._chat.model_name,
            "output": [*self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **{name: value for name, value in (body.text or {}).items() if value}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            **fields,
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        counts = usage(output, len(self._token_ids))
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
            "output_tokens": len(self._token_ids),
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens, **draft_details([output])},
            "total_tokens": counts["total_tokens"],
        }


def _index(kind: str) -> dict[str, int]:
    return {} if kind in _CALLS else {"content_index": 0}


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Type of an item that is a call -> the field of its text."""
_LAST = ("response.completed", "response.incomplete")
"""Types of the last event of an answer."""
_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {},
    "custom_tool_call": {},
}
_DELTAS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
