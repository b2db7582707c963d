"""Anthropic's /v1/messages and /v1/messages/count_tokens. Source of the events: the types of the `anthropic` package."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import naming_field
from ...engine.outputs import CompletionOutput, RequestOutput
from ..error_shapes import anthropic_body
from ..errors import error_body, naming_places
from ..outputs import usage
from ..protocol.chat import ChatBody
from ..protocol.messages import CountBody, MessagesBody, as_input
from ..request_record import stream_error
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected
from ..streams import open_stream
from ..uploaded_files import with_files
from .answer_writer import AnswerWriter, Event, Kind
from .chat import Chat
from .tokens import run_planner

_FORMAT_FIELDS = {"response_format": "output_config"}
_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}


async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    body.messages = await with_files(request, body.messages, "messages")
    server = server_of(request)
    chat_body, places = body.chat_body(server.services.reasoning_signer)
    field = chat_body.format_field
    with naming_places(places), naming_field("structured_outputs", _FORMAT_FIELDS.get(field, field)):
        answer = MessageWriter(server, body, chat_body)
        outputs = answer.outputs(cache_salt(request, body.cache_salt), priority_of(request))
        if body.stream:
            return await open_stream(request, outputs, lambda first: answer.stream(checked(first), outputs), with_done=False)
        first = checked(await unless_disconnected(request, first_output(outputs)))
    return JSONResponse(await unless_disconnected(request, answer.whole(first, outputs)))


async def count_tokens(body: CountBody, request: Request) -> Response:
    """Return the tokens of the prompt that the same request to /v1/messages would have."""
    body.messages = await with_files(request, body.messages, "messages")
    server = server_of(request)
    chat_body, places = body.chat_body(server.services.reasoning_signer)
    with naming_places(places):
        chat = Chat(server, chat_body)
        options = chat.options(cache_salt(request, body.cache_salt))
        count = partial(server.engine.count_tokens, chat.messages, **options)
        return JSONResponse({"input_tokens": await run_planner(request, count)})


class MessageWriter(AnswerWriter):
    """One message: writes the events of its stream, and keeps its blocks."""

    def __init__(self, server: Server, body: MessagesBody, chat_body: ChatBody) -> None:
        super().__init__(Chat(server, chat_body, new_id("msg_")))
        self._server, self._body = server, body
        self._content: list[dict[str, Any]] = []  # finished blocks
        self._block: dict[str, Any] = {}  # the open block
        self._texts: list[str] = []  # of the open block
        self._message: dict[str, Any] = {}

    def outputs(self, salt: str | None, priority: int) -> AsyncGenerator[RequestOutput, None]:
        """Start the request."""
        chat = self._chat
        kind = "delta" if self._body.stream or self.needs_deltas else "final"
        return self._server.llm.generate(chat.messages, chat.params, chat.id, kind, priority, **chat.options(salt))

    async def whole(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> dict[str, Any]:
        """Return the whole message."""
        async with aclosing(self._events(output, outputs)) as events:
            async for _ in events:
                pass
        return self._message

    async def stream(self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream. An error becomes its last event."""
        async with aclosing(self._events(output, outputs)) as events:
            try:
                async for event in events:
                    yield event
            except Exception as error:
                yield anthropic_body(*error_body(stream_error(error)))

    def _begin(self, output: RequestOutput) -> Iterator[Event]:
        self._message = {
            "id": self._chat.id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output),
        }
        yield {"type": "message_start", "message": self._message}
        yield {"type": "ping"}

    def _open(self, kind: Kind, name: str) -> Iterator[Event]:
        if kind == "message":
            self._block = {"type": "text", "text": "", "citations": None}
        elif kind == "reasoning":
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._block = {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}}
        if self._is_written:
            yield {"type": "content_block_start", "index": len(self._content), "content_block": dict(self._block)}

    def _delta(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        kind = self._block["type"]
        if kind == "tool_use":
            yield self._block_delta("input_json_delta", partial_json=text)
        elif text and self._is_written and not (kind == "thinking" and self._omits_thinking):
            yield self._block_delta(f"{kind}_delta", **{kind: text})

    def _close(self, is_cut: bool) -> Iterator[Event]:
        if self._kind is None:
            return
        kind, text = self._block["type"], "".join(self._texts)
        if self._is_written:
            if kind == "thinking":
                self._block["signature"] = self._server.services.reasoning_signer.sign(text)
                yield self._block_delta("signature_delta", signature=self._block["signature"])
            if not (kind == "thinking" and self._omits_thinking):
                self._block[_FIELDS[kind]] = as_input(text) if kind == "tool_use" else text
            yield {"type": "content_block_stop", "index": len(self._content)}
            self._content.append(self._block)
        self._kind, self._texts = None, []

    def _end(self, output: RequestOutput, answer: CompletionOutput, is_cut: bool) -> Iterator[Event]:
        yield from self._close(is_cut)
        reason, sequence = self._stop(answer, is_cut)
        stopped = {"stop_reason": reason, "stop_sequence": sequence}
        self._message = {**self._message, "content": self._content, **stopped, "usage": self._usage(output)}
        yield {"type": "message_delta", "delta": stopped, "usage": self._usage(output)}
        yield {"type": "message_stop"}

    def _stop(self, answer: CompletionOutput, is_cut: bool) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence."""
        if is_cut or not self._body.max_tokens:
            is_full = len(self._token_ids) < (self._body.answer_tokens or 0)
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(answer.stop_reason, str):
            return "stop_sequence", answer.stop_reason
        return "tool_use" if any(block["type"] == "tool_use" for block in self._content) else "end_turn", None

    @property
    def _is_written(self) -> bool:
        """True if the message gets the open block: not if max_tokens is 0, and not if it is reasoning that is left out."""
        hides = self._block["type"] == "thinking" and self._chat.body.include_reasoning is False
        return self._body.max_tokens > 0 and not hides

    @property
    def _omits_thinking(self) -> bool:
        return self._body.thinking is not None and self._body.thinking.display == "omitted"

    def _block_delta(self, kind: str, **fields: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._content), "delta": {"type": kind, **fields}}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Return the usage so far. Tokens of the prompt that the cache had are not in `input_tokens`."""
        counts = usage(output, len(self._token_ids))
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        tokens = len(self._token_ids) if self._body.max_tokens else 0
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens if tokens else 0},
            "service_tier": "standard",
        }
