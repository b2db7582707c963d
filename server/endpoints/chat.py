"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine.sampling_params import SamplingParams
from ...engine.types import CompletionOutput, RequestOutput
from ...mm.errors import InputError, renaming_param
from ..events import event_stream
from ..outputs import chat_logprobs, finish_reason, usage
from ..parsers.answer import AnswerParser
from ..parsers.pieces import Arguments, Call, Content, Piece, Reasoning
from ..protocol.chat import ChatBody
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected


async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    salt, priority, kind = cache_salt(request, body.cache_salt), priority_of(request), "delta" if body.stream else "final"
    with renaming_param("structured_outputs", body.format_field):
        chat = Chat(server_of(request), body)
        outputs = chat.server.engine.generate(body.messages, chat.params, chat.id, kind, priority, **chat.options(salt))
        first = checked(await unless_disconnected(request, first_output(outputs)))
    if body.stream:
        return event_stream(chat.chunks(first, outputs))
    return JSONResponse(await asyncio.to_thread(chat.response, first) if body.return_elements else chat.response(first))


@dataclass
class Chat:
    """One request: its parameters and the forms of its responses."""

    server: Server
    body: ChatBody
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        body, form = self.body, self.server.answer_format
        self.server.check_model(body.model)
        self.server.check_messages(body.messages)
        self.forced, self.functions = body.forced_function, {} if body.tool_choice == "none" else body.functions
        if self.functions and self.forced is None and form.calls is None:
            how = "set tool_choice to none or required, or start the server with --tool-call-parser"
            raise InputError(f"the chat template has no tool calls that this server can read; {how}", param="tools")
        self.with_specials = form.needs_specials(bool(self.functions)) and body.skip_special_tokens is not False
        own: dict[str, Any] = {"max_tokens": body.token_limit, "logprobs": body.num_logprobs}
        if self.with_specials:
            own["skip_special_tokens"] = False
        own["structured_outputs"] = body.forced_format()
        self.params: SamplingParams = body.sampling_params(self.server.engine.llm.default_params, **own)

    def options(self, salt: str | None) -> dict[str, Any]:
        """Return the arguments of `LLM.chat`."""
        body = self.body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        continues = bool(body.continue_final_message)
        options = {
            "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            "continue_final_message": continues,
            "tools": body.tools if self.functions else None,
            "chat_template_kwargs": variables or None,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "cache_salt": salt,
            "fit": body.fit,
        }
        return {name: value for name, value in options.items() if value is not None}

    def parser(self, prompt: str | None) -> AnswerParser:
        most = 1 if self.body.parallel_tool_calls is False else None
        form = self.server.answer_format
        return AnswerParser(form, prompt or "", self.functions, self.forced, most, self.with_specials)

    def response(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""
        tokens = sum(len(answer.token_ids) for answer in output.outputs)
        response = self._object("chat.completion", [self._choice(output, answer) for answer in output.outputs])
        response["usage"] = usage(output, tokens)
        if self.body.return_timings:
            response["timings"] = output.timings
        if self.body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = [
                None if entry is None else {str(token): _prompt_logprob(one) for token, one in entry.items()}
                for entry in output.prompt_logprobs or ()
            ]
        return response

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        parser = self.parser(output.prompt)
        pieces = [*parser.push(answer.text), *parser.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Call):
                calls.append(_call(piece, len(calls)))
            elif isinstance(piece, Arguments):
                calls[-1]["function"]["arguments"] += piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning and self.body.include_reasoning is not False:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs([answer]),
            "finish_reason": _finish(answer, bool(calls)),
            "stop_reason": answer.stop_reason,
            **self.elements(answer),
        }
        return {**choice, "token_ids": answer.token_ids} if self.body.return_token_ids else choice

    def elements(self, answer: CompletionOutput) -> dict[str, Any]:
        """Return the elements that a finished answer names, if the request asks for them."""
        return {"elements": [asdict(one) for one in answer.elements]} if self.body.return_elements else {}

    async def chunks(
        self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of a stream, from its first output on."""
        streams = [ChoiceStream(self, index, self.parser(output.prompt)) for index in range(self.params.n)]
        with_usage, always = self.body.usage_in_stream
        try:
            while True:
                for answer in checked(output).outputs:
                    if self.body.return_elements and answer.finish_reason is not None:
                        await asyncio.to_thread(getattr, answer, "elements")  # kept by the answer
                    for choice in streams[answer.index].choices(answer, output.prompt_token_ids):
                        chunk = self._object("chat.completion.chunk", [choice])
                        tokens = sum(stream.num_tokens for stream in streams)
                        yield {**chunk, "usage": usage(output, tokens) if always else None} if with_usage else chunk
                if output.finished:
                    break
                output = await anext(outputs)
            tokens = sum(stream.num_tokens for stream in streams)
            last = {"usage": usage(output, tokens)} if with_usage else {}
            if self.body.return_timings:
                last["timings"] = output.timings
            if last:
                yield self._object("chat.completion.chunk", []) | last
        finally:
            await outputs.aclose()

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.name, "choices": choices}

    def _logprobs(self, answers: Sequence[CompletionOutput]) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        return {"content": self.token_logprobs(answers), "refusal": None}

    def token_logprobs(self, answers: Sequence[CompletionOutput]) -> list[dict[str, Any]]:
        """Return an entry for each token; empty if the request asks for none."""
        token_bytes, count = self.server.engine.llm.get_tokenizer().token_bytes, self.params.logprobs
        return [] if count is None else [entry for one in answers for entry in chat_logprobs(one, count, token_bytes)]


class ChoiceStream:
    """One answer of a stream as choices of chunks."""

    def __init__(self, chat: Chat, index: int, parser: AnswerParser) -> None:
        self._chat, self._index, self._parser = chat, index, parser
        self._unsent: list[CompletionOutput] = []  # tokens whose text the parser holds back
        self._num_calls = 0
        self._began = self._finished = False
        self.num_tokens = 0

    def choices(self, answer: CompletionOutput, prompt_token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the choices of new output."""
        if self._finished:
            return []
        found = []
        if not self._began:
            self._began = True
            found.append(self._choice({"role": "assistant", "content": ""}))
            if self._chat.body.return_token_ids:
                found[0]["prompt_token_ids"] = prompt_token_ids
        self.num_tokens += len(answer.token_ids)
        self._unsent.append(answer)
        pieces = self._parser.push(answer.text)
        if answer.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        found += [self._choice(delta) for delta in map(self._delta, pieces) if delta]
        if answer.finish_reason is not None:
            self._finished = True
            last = {"finish_reason": _finish(answer, bool(self._num_calls)), "stop_reason": answer.stop_reason}
            found.append({**self._choice({}), **last, **self._chat.elements(answer)})
        return found

    def _choice(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """Return a choice with the log probabilities and ids of the tokens since the last one."""
        sent = () if "role" in delta else self._unsent
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        if any(answer.token_ids for answer in sent):
            choice["logprobs"] = self._chat._logprobs(sent)
            if self._chat.body.return_token_ids:
                choice["token_ids"] = [token for answer in sent for token in answer.token_ids]
            self._unsent = []
        return choice

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {} if self._chat.body.include_reasoning is False else {"reasoning_content": piece.text}
        if isinstance(piece, Arguments):
            return {"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": piece.text}}]}
        self._num_calls += 1
        return {"tool_calls": [_call(piece, self._num_calls - 1)]}


def _call(call: Call, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": new_id("call_"), "type": "function", "function": function}


def _finish(answer: CompletionOutput, has_calls: bool) -> str | None:
    reason = finish_reason(answer)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _prompt_logprob(entry: Any) -> dict[str, Any]:
    return {"logprob": max(entry.logprob, -9999.0), "rank": entry.rank, "decoded_token": entry.decoded_token}
