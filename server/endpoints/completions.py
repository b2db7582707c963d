"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import naming_field, naming_param
from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.sampling_params import SamplingParams
from ..answers import answer_count, beam_params, best_beams
from ..outputs import completion_logprobs, finish_reason, total_usage
from ..protocol.completions import CompletionBody
from ..state import Server, cache_salt, checked, new_id, priority_of, server_of, unless_disconnected
from ..streams import open_stream

_DEFAULT_TOKENS = 16  # as in OpenAI's API


async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    with naming_field("structured_outputs", body.format_field):
        completion = Completion(
            server_of(request), body, cache_salt(request, body.cache_salt), priority_of(request, body.priority)
        )
        if not body.stream:
            return JSONResponse(completion.response(await unless_disconnected(request, completion.outputs())))
        stream = merged([completion.generate(index, "delta") for index in range(len(completion.prompts))])

        def chunks(first: tuple[int, RequestOutput]) -> AsyncGenerator[Mapping[str, Any], None]:
            completion.checked(*first)
            return completion.chunks(first, stream)

        return await open_stream(request, stream, chunks)


@dataclass
class Completion:
    """One request: its parameters and the forms of its responses."""

    server: Server
    body: CompletionBody
    salt: str | None
    priority: int
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        body = self.body
        self.adapter = self.server.adapter_of(body.model)
        self.prompts = body.prompts
        self.scores_prompt = bool(body.echo) and body.max_tokens == 0  # the engine generates a token, which is dropped
        most = 1 if self.scores_prompt else body.max_tokens
        overrides: dict[str, Any] = {"max_tokens": _DEFAULT_TOKENS if most is None else most}
        overrides["logprobs"] = body.logprobs
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            overrides["prompt_logprobs"] = body.logprobs
        engine = self.server.engine
        self.params: SamplingParams = body.sampling_params(engine.default_params, **overrides)
        self.beams = beam_params(body, self.params, engine.max_model_len)
        self.count = answer_count(body, self.params, engine.config.sampling_limits)
        self.params = self.count.apply(self.params)

    def generate(self, index: int, kind: str) -> AsyncGenerator[RequestOutput, None]:
        options: dict[str, Any] = {} if self.adapter is None else {"adapter": self.adapter}
        prompt, request_id = self._prompt(index), f"{self.id}-{index}"
        outputs = self.server.llm.generate(prompt, self.params, request_id, kind, self.priority, **options)
        return self.count.copied(outputs)

    def _prompt(self, index: int) -> dict[str, Any]:
        prompt = self.prompts[index]
        request: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        return request if self.salt is None else {**request, "cache_salt": self.salt}

    async def outputs(self) -> list[RequestOutput]:
        """Return the outputs of all prompts. The first error ends the other prompts."""
        tasks = [asyncio.ensure_future(self._output(index)) for index in range(len(self.prompts))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _output(self, index: int) -> RequestOutput:
        if self.beams is not None:
            llm = self.server.llm
            handle = llm.engine.request(self._prompt(index), self.params, self.priority, f"{self.id}-{index}")
            with naming_param(self._name(index)):
                return self._without_answer(await best_beams(llm, handle, self.beams, self.body))
        async with aclosing(self.generate(index, "final")) as outputs:
            return self.checked(index, await anext(outputs))

    def checked(self, index: int, output: RequestOutput) -> RequestOutput:
        """Return the output of a prompt; its answer is empty if only the prompt is scored.

        Raises:
            SensoriumError: the output's error, which names the prompt.
        """
        with naming_param(self._name(index)):
            output = checked(output)
        return self._without_answer(output)

    def _name(self, index: int) -> str:
        """Return the field of a prompt."""
        return "prompt" if len(self.prompts) == 1 else f"prompt[{index}]"

    def _without_answer(self, output: RequestOutput) -> RequestOutput:
        if not self.scores_prompt:
            return output
        nothing: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "finish_reason": "length", "stop_reason": None}
        return replace(output, outputs=[replace(answer, **nothing) for answer in output.outputs])

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answers."""
        choices = [
            self._choice(prompt, output, answer, begin=True)
            for prompt, output in enumerate(outputs)
            for answer in self.count.chosen(output.outputs)
        ]
        tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        return {**self._object(choices), "usage": total_usage(outputs, tokens)}

    async def chunks(
        self, first: tuple[int, RequestOutput], stream: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of a stream, from its first output on."""
        with_usage, always = self.body.usage_in_stream
        latest: dict[int, RequestOutput] = {}
        lengths: dict[tuple[int, int], int] = {}  # characters sent of each answer
        ended: set[tuple[int, int]] = set()
        tokens = 0
        async with aclosing(stream):
            entry: tuple[int, RequestOutput] | None = first
            while entry is not None:
                prompt, output = entry
                output = latest[prompt] = self.checked(prompt, output)
                for answer in output.outputs:
                    key = (prompt, answer.index)
                    if key in ended or not (answer.text or answer.token_ids or answer.finish_reason or key not in lengths):
                        continue
                    tokens += len(answer.token_ids)
                    choice = self._choice(prompt, output, answer, begin=key not in lengths, start=lengths.get(key, 0))
                    lengths[key] = lengths.get(key, 0) + len(choice["text"])
                    if answer.finish_reason is not None:
                        ended.add(key)
                    usage = total_usage(list(latest.values()), tokens) if always else None
                    yield self._object([choice]) | ({"usage": usage} if with_usage else {})
                entry = await anext(stream, None)
            if with_usage:
                yield {**self._object([]), "usage": total_usage(list(latest.values()), tokens)}

    def _object(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.adapter or self.server.name,
            "system_fingerprint": self.server.fingerprint,
            "choices": choices,
        }

    def _choice(
        self, prompt: int, output: RequestOutput, answer: CompletionOutput, begin: bool, start: int = 0
    ) -> dict[str, Any]:
        """Return a choice. `begin`: with the prompt if `echo` asks for it; `start`: characters sent before."""
        echo = begin and bool(self.body.echo)
        text = (self._prompt_text(output) if echo else "") + answer.text
        choice = {
            "index": prompt * self.count.wanted + answer.index,
            "text": text,
            "logprobs": self._logprobs(output, answer, echo, start),
            "finish_reason": finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        tokenizer = self.server.engine.tokenizer
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) if output.prompt is None else output.prompt

    def _logprobs(self, output: RequestOutput, answer: CompletionOutput, echo: bool, start: int) -> dict[str, Any] | None:
        count = self.body.logprobs
        if count is None:
            return None
        ids, entries = list(answer.token_ids), list[Any](answer.logprobs or ())
        if echo:
            ids, entries = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or ()), *entries]
        decode = partial(self.server.engine.tokenizer.decode, skip_special_tokens=False)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return completion_logprobs(ids, entries, count, lambda token: decode([token]), start, as_ids)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index, output) of several streams, each output when it comes. Closing it closes all of them."""
    following = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while following:
            done, _ = await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = following.pop(future)
                try:
                    output = future.result()
                except StopAsyncIteration:
                    continue
                following[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for future in following:
            future.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
