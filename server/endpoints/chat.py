"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import InputError, naming_field
from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.sampling_params import SamplingParams
from ..answers import answer_count, beam_params, best_beams
from ..custom_calls import CustomCall, CustomCallParser
from ..outputs import chat_logprobs, finish_reason, usage, with_reasoning
from ..parsers.answer import AnswerParser, AnswerRules
from ..parsers.pieces import Arguments, Call, Content, Piece, Reasoning
from ..protocol.chat import ChatBody
from ..protocol.tools import as_template_messages, read_tools
from ..reasoning_counter import ReasoningCounter
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected
from ..streams import open_stream
from ..uploaded_files import with_files


async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    body.messages = await with_files(request, body.messages, "messages")
    salt, priority, kind = (
        cache_salt(request, body.cache_salt),
        priority_of(request, body.priority),
        "delta" if body.stream else "final",
    )
    with naming_field("structured_outputs", body.format_field), naming_field("draft_text", body.draft_field):
        chat = Chat(server_of(request), body)
        llm, options = chat.server.llm, chat.options(salt)
        if chat.beams is not None:
            handle = llm.engine.request(chat.messages, chat.params, priority, chat.id, **options)
            first = await unless_disconnected(request, best_beams(llm, handle, chat.beams, body))
            return JSONResponse(await asyncio.to_thread(chat.response, first))
        outputs = chat.count.copied(llm.generate(chat.messages, chat.params, chat.id, kind, priority, **options))
        if body.stream:
            return await open_stream(request, outputs, lambda first: chat.chunks(checked(first), outputs))
        first = checked(await unless_disconnected(request, first_output(outputs)))
    return JSONResponse(await asyncio.to_thread(chat.response, first) if body.return_elements else chat.response(first))


@dataclass
class Chat:
    """One request: its parameters and the forms of its responses."""

    server: Server
    body: ChatBody
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        body, answer_format = self.body, self.server.answer_format
        self.adapter = self.server.adapter_of(body.model)
        self.messages = self.server.checked_messages(as_template_messages(body.messages))
        read_tools(body.tools or ())  # tools that tool_choice leaves out are checked, too
        self.forced, self.tools = body.forced_tool, body.offered
        self.functions = {name: tool.parameters for name, tool in self.tools.items()}
        self.custom = [name for name, tool in self.tools.items() if tool.is_custom]
        if self.functions and self.forced is None and answer_format.calls is None:
            how = "set tool_choice to none or required, or start the server with --tool-call-parser"
            raise InputError(f"the chat template has no tool calls that this server can read; {how}", param="tools")
        self.num_logprobs = body.num_logprobs
        overrides: dict[str, Any] = {"max_tokens": body.token_limit, "logprobs": self.num_logprobs}
        overrides["structured_outputs"] = body.forced_format()
        engine = self.server.engine
        self.params: SamplingParams = body.sampling_params(engine.default_params, **overrides)
        self.beams = beam_params(body, self.params, engine.max_model_len)
        self.count = answer_count(body, self.params, engine.config.sampling_limits)
        self.params = self.count.apply(self.params)
        output_format = self.params.structured_outputs
        self.in_grammar = output_format is not None and output_format.form == "grammar"
        self.is_constrained = output_format is not None and not self.in_grammar
        needs_specials = answer_format.needs_specials(bool(self.functions)) and not self.is_constrained
        self.with_specials = needs_specials and body.skip_special_tokens is not False
        if self.with_specials:
            self.params = replace(self.params, skip_special_tokens=False)

    @property
    def model_name(self) -> str:
        """The model of responses: the adapter, if the request names one."""
        return self.adapter or self.server.name

    def options(self, salt: str | None) -> dict[str, Any]:
        """Return the arguments of `LLM.chat`."""
        body = self.body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        if body.documents is not None:
            variables["documents"] = body.documents
        if body.verbosity is not None:
            variables["verbosity"] = body.verbosity
        continues = bool(body.continue_final_message)
        options = {
            "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            "continue_final_message": continues,
            "tools": [tool.shown for tool in self.tools.values()] or None,
            "chat_template_kwargs": variables or None,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "cache_salt": salt,
            "fit": body.fit,
            "adapter": self.adapter,
        }
        return {name: value for name, value in options.items() if value is not None}

    def parser(self, prompt: str | None) -> AnswerParser | CustomCallParser:
        max_calls = 1 if self.body.parallel_tool_calls is False else None
        parser = AnswerParser(
            self.server.answer_format,
            prompt or "",
            self.functions,
            AnswerRules(
                self.forced, max_calls, self.with_specials, self.body.continued_text, self.is_constrained, self.in_grammar
            ),
        )
        is_plain = bool(self.forced) and self.tools[self.forced or ""].grammar is not None
        return CustomCallParser(parser, self.custom, is_plain) if self.custom else parser

    def reasoning_counter(self, prompt: str | None) -> ReasoningCounter | None:
        """Return what counts the tokens of an answer's reasoning, or None if no reasoning is read."""
        if self.server.answer_format.reasoning is None:
            return None
        decoder = self.server.engine.tokenizer.stream_decoder(self.params.skip_special_tokens)
        return ReasoningCounter(self.parser(prompt), decoder.push)

    def response(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer."""
        tokens = sum(len(answer.token_ids) for answer in output.outputs)
        response = self._object(
            "chat.completion", [self._choice(output, answer) for answer in self.count.chosen(output.outputs)]
        )
        response["usage"] = with_reasoning(usage(output, tokens), self._reasoning_tokens(output))
        if self.body.return_timings:
            response["timings"] = output.timings
        if self.body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = [
                None if entry is None else {str(token): _prompt_logprob(logprob) for token, logprob in entry.items()}
                for entry in output.prompt_logprobs or ()
            ]
        return response

    def _reasoning_tokens(self, output: RequestOutput) -> int:
        counters = [(self.reasoning_counter(output.prompt), answer) for answer in output.outputs]
        for counter, answer in counters:
            if counter is not None:
                counter.push(answer.token_ids)
        return sum(counter.num_tokens for counter, _ in counters if counter is not None)

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        parser = self.parser(output.prompt)
        pieces = [*parser.push(answer.text), *parser.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Call | CustomCall):
                calls.append(_call(piece, len(calls)))
            elif isinstance(piece, Arguments):
                kind, key = _CONTINUED[calls[-1]["type"]]
                calls[-1][kind][key] += piece.text
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
        return {"elements": [element.fields() for element in answer.elements]} if self.body.return_elements else {}

    async def chunks(
        self, output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of a stream, from its first output on."""
        with_usage, always = self.body.usage_in_stream
        streams = [
            ChoiceStream(self, index, self.parser(output.prompt), self.reasoning_counter(output.prompt) if with_usage else None)
            for index in range(self.count.wanted)
        ]
        try:
            while True:
                for answer in checked(output).outputs:
                    if self.body.return_elements and answer.finish_reason is not None:
                        await asyncio.to_thread(getattr, answer, "elements")  # kept by the answer
                    for choice in streams[answer.index].choices(answer, output.prompt_token_ids):
                        chunk = self._object("chat.completion.chunk", [choice])
                        yield {**chunk, "usage": _usage(output, streams) if always else None} if with_usage else chunk
                if output.finished:
                    break
                output = await anext(outputs)
            last: dict[str, Any] = {"usage": _usage(output, streams)} if with_usage else {}
            if self.body.return_timings:
                last["timings"] = output.timings
            if last:
                yield self._object("chat.completion.chunk", []) | last
        finally:
            await outputs.aclose()

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        name, fingerprint = self.model_name, self.server.fingerprint
        head = {"id": self.id, "object": kind, "created": self.created, "model": name, "system_fingerprint": fingerprint}
        return {**head, "choices": choices}

    def _logprobs(self, answers: Sequence[CompletionOutput]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        return {"content": self.token_logprobs(answers), "refusal": None}

    def token_logprobs(self, answers: Sequence[CompletionOutput]) -> list[dict[str, Any]]:
        """Return an entry for each token; empty if the request asks for none."""
        token_bytes, count = self.server.engine.tokenizer.token_bytes, self.num_logprobs
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return (
            []
            if count is None
            else [entry for answer in answers for entry in chat_logprobs(answer, count, token_bytes, as_ids)]
        )


class ChoiceStream:
    """One answer of a stream as choices of chunks."""

    def __init__(
        self, chat: Chat, index: int, parser: AnswerParser | CustomCallParser, counter: ReasoningCounter | None = None
    ) -> None:
        self._chat, self._index, self._parser, self._counter = chat, index, parser, counter
        self._unsent: list[CompletionOutput] = []  # tokens whose text the parser holds back
        self._num_calls = 0
        self._call_type = ""  # of the last call
        self._began = self._finished = False
        self.num_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.num_tokens

    def choices(self, answer: CompletionOutput, prompt_token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the choices of new output."""
        if self._finished:
            return []
        choices = []
        if not self._began:
            self._began = True
            choices.append(self._choice({"role": "assistant", "content": ""}))
            if self._chat.body.return_token_ids:
                choices[0]["prompt_token_ids"] = prompt_token_ids
        self.num_tokens += len(answer.token_ids)
        if self._counter is not None:
            self._counter.push(answer.token_ids)
        self._unsent.append(answer)
        pieces = self._parser.push(answer.text)
        if answer.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        choices += [self._choice(delta) for delta in map(self._delta, pieces) if delta]
        if answer.finish_reason is not None:
            self._finished = True
            last = {"finish_reason": _finish(answer, bool(self._num_calls)), "stop_reason": answer.stop_reason}
            choices.append({**self._choice({}), **last, **self._chat.elements(answer)})
        return choices

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

    def _delta(self, piece: Piece | CustomCall) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {} if self._chat.body.include_reasoning is False else {"reasoning_content": piece.text}
        if isinstance(piece, Arguments):
            kind, key = _CONTINUED[self._call_type]
            return {"tool_calls": [{"index": self._num_calls - 1, kind: {key: piece.text}}]}
        call = _call(piece, self._num_calls)
        self._num_calls, self._call_type = self._num_calls + 1, call["type"]
        return {"tool_calls": [call]}


_CONTINUED = {"function": ("function", "arguments"), "custom": ("custom", "input")}
"""Type of a call -> where its text is."""


def _usage(output: RequestOutput, streams: Sequence[ChoiceStream]) -> dict[str, Any]:
    counts = usage(output, sum(stream.num_tokens for stream in streams))
    return with_reasoning(counts, sum(stream.reasoning_tokens for stream in streams))


def _call(call: Call | CustomCall, index: int) -> dict[str, Any]:
    head = {"index": index, "id": new_id("call_")}
    if isinstance(call, CustomCall):
        return {**head, "type": "custom", "custom": {"name": call.name, "input": call.input}}
    return {**head, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(answer: CompletionOutput, has_calls: bool) -> str | None:
    reason = finish_reason(answer)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _prompt_logprob(entry: Any) -> dict[str, Any]:
    return {"logprob": max(entry.logprob, -9999.0), "rank": entry.rank, "decoded_token": entry.decoded_token}
