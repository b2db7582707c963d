"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine.errors import error_info
from ...engine.types import CompletionOutput, RequestOutput
from ...mm.errors import SensoriumError, renaming_param
from ...mm.wordings import field_of
from ..errors import error_body
from ..events import event_stream
from ..outputs import finish_reason, usage
from ..parsers.pieces import Call, Content, Piece, Reasoning
from ..protocol.chat import ChatBody
from ..protocol.responses import ResponsesBody
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected
from .chat import Chat

Event = dict[str, Any]


async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer an input of messages, tool calls and their outputs."""
    chat_body, places = body.chat_body()
    form = chat_body.format_field
    with _renamed(places), renaming_param("structured_outputs", "text.format" if form == "response_format" else form):
        answer = ResponseWriter(server_of(request), body, chat_body)
        outputs = answer.outputs(cache_salt(request, body.cache_salt), priority_of(request))
        first = checked(await unless_disconnected(request, first_output(outputs)))
        if body.stream:
            return event_stream(answer.stream(first, outputs), with_done=False)
        return JSONResponse(await unless_disconnected(request, answer.whole(first, outputs)))


@contextmanager
def _renamed(places: Mapping[str, str]) -> Iterator[None]:
    """Name the field of the request, such as "input[0].content[1]", in errors that name the chat's "messages[1].content[1]"."""
    try:
        yield
    except SensoriumError as error:
        given = field_of(error.info.param) or ""
        place = max((one for one in places if given == one or given.startswith((f"{one}.", f"{one}["))), key=len, default=None)
        if place is not None:
            error.info = replace(error.info, param=places[place] + given.removeprefix(place))
        raise


class ResponseWriter:
    """One response: writes the events of its stream, and keeps the items of its output."""

    def __init__(self, server: Server, body: ResponsesBody, chat_body: ChatBody) -> None:
        self._server, self._body = server, body
        self._chat = Chat(server, chat_body, new_id("resp_"))
        self._output: list[dict[str, Any]] = []  # finished items
        self._item: dict[str, Any] | None = None  # the open item
        self._texts: list[str] = []  # of the open item
        self._blank = ""  # whitespace that may begin a message
        self._unsent: list[CompletionOutput] = []  # tokens whose text the parser holds back
        self._sequence = self._tokens = self._reasoning_tokens = 0
        self._logprobs: list[dict[str, Any]] = []  # of the open item

    def outputs(self, salt: str | None, priority: int) -> AsyncGenerator[RequestOutput, None]:
        """Start the request. Reasoning counts and log probabilities by item need an output per token, so these cases stream."""
        chat, form = self._chat, self._server.answer_format
        kind = "delta" if self._body.stream or chat.params.logprobs is not None or form.reasoning else "final"
        return self._server.engine.generate(chat.body.messages, chat.params, chat.id, kind, priority, **chat.options(salt))

    async def whole(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> dict[str, Any]:
        """Return the whole response."""
        async with aclosing(self._events(output, outputs)) as events:
            found: dict[str, Any] = [event async for event in events][-1]["response"]
        return found

    async def stream(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream. An error becomes its last event."""
        async with aclosing(self._events(output, outputs)) as events:
            try:
                async for event in events:
                    yield event
            except Exception as error:
                info = error_info(error, "a request")
                reason = {"code": "server_error", "message": error_body(info)[1]["error"]["message"]}
                yield self._event("failed", response=self._response("failed", error=reason))

    async def _events(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        async with aclosing(outputs):
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response("in_progress"))
            parser = self._chat.parser(output.prompt)
            while True:
                (answer,) = checked(output).outputs
                self._tokens += len(answer.token_ids)
                inside = parser.in_reasoning
                pieces = parser.push(answer.text)
                if inside or parser.in_reasoning:
                    self._reasoning_tokens += len(answer.token_ids)
                else:
                    self._unsent.append(answer)
                for event in self._pieces(pieces):
                    yield event
                if output.finished:
                    break
                output = await anext(outputs)
            for event in self._finish(parser.finish(), finish_reason(answer) == "length"):
                yield event
            status, details = ("incomplete", "max_output_tokens") if finish_reason(answer) == "length" else ("completed", None)
            reason = None if details is None else {"reason": details}
            response = self._response(status, incomplete_details=reason, completed_at=int(time.time()))
            yield self._event(status, response={**response, "usage": self._usage(output)})

    def _finish(self, pieces: Sequence[Piece], is_cut: bool) -> Iterator[Event]:
        yield from self._pieces(pieces)
        if not self._output and self._item is None:
            yield from self._open("message")
            yield from self._delta("")
        yield from self._close("incomplete" if is_cut else "completed")

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, Content):
                yield from self._content(piece.text)
                continue
            if isinstance(piece, Reasoning):
                if self._kind != "reasoning":
                    yield from self._open("reasoning")
            elif isinstance(piece, Call):
                yield from self._open("function_call", call_id=new_id("call_"), name=piece.name, arguments="")
            self._blank, self._unsent = "", []
            yield from self._delta(piece.arguments if isinstance(piece, Call) else piece.text)

    def _content(self, text: str) -> Iterator[Event]:
        """Write text for the user. Whitespace alone begins no message."""
        text, self._blank = self._blank + text, ""
        if self._kind != "message":
            if not text.strip():
                self._blank = text
                return
            yield from self._open("message")
        yield from self._delta(text)

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else self._item["type"]

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Close the open item and begin another one."""
        yield from self._close("completed")
        self._item = {"id": new_id(_PREFIXES[kind]), "type": kind, **_FIELDS[kind], "status": "in_progress", **fields}
        yield self._event("output_item.added", output_index=len(self._output), item=dict(self._item))
        if kind != "function_call":
            yield self._event("content_part.added", **self._place, content_index=0, part=self._part(""))

    def _delta(self, text: str) -> Iterator[Event]:
        kind, fields = self._kind or "", dict(self._place)
        self._texts.append(text)
        if kind == "message":
            logprobs, self._unsent = self._chat.token_logprobs(self._unsent), []
            self._logprobs += logprobs
            fields["logprobs"] = logprobs
        if text:
            yield self._event(f"{_DELTAS[kind]}.delta", **fields, **_index(kind), delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        if self._item is None:
            return
        kind, text, place = self._item["type"], "".join(self._texts), self._place
        if kind == "function_call":
            self._item["arguments"] = text
            yield self._event(f"{_DELTAS[kind]}.done", **place, name=self._item["name"], arguments=text)
        else:
            part = self._part(text)
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._event(f"{_DELTAS[kind]}.done", **place, **_index(kind), text=text, **logprobs)
            yield self._event("content_part.done", **place, **_index(kind), part=part)
            self._item["content"] = [part]
        self._item["status"] = status
        yield self._event("output_item.done", output_index=len(self._output), item=self._item)
        self._output.append(self._item)
        self._item, self._texts, self._logprobs = None, [], []

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body, params = self._body, self._chat.params
        return {
            "id": self._chat.id,
            "object": "response",
            "created_at": self._chat.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._server.name,
            "output": [*self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **{name: value for name, value in (body.text or {}).items() if value}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        found = usage(output, self._tokens)
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **found["prompt_tokens_details"]},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": found["total_tokens"],
        }


def _index(kind: str) -> dict[str, int]:
    return {} if kind == "function_call" else {"content_index": 0}


_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {},
}
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
