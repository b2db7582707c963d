"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...engine.sampling_params import SamplingParams
from ...engine.types import CompletionOutput, RequestOutput
from ...mm.errors import naming_param, renaming_param
from ..events import event_stream
from ..outputs import completion_logprobs, finish_reason, total_usage
from ..protocol.completions import CompletionBody
from ..state import Server, cache_salt, checked, first_output, new_id, priority_of, server_of, unless_disconnected

_DEFAULT_TOKENS = 16  # as in OpenAI's API


async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    with renaming_param("structured_outputs", body.format_field):
        completion = Completion(server_of(request), body, cache_salt(request, body.cache_salt), priority_of(request))
        if not body.stream:
            return JSONResponse(completion.response(await unless_disconnected(request, completion.outputs())))
        stream = merged([completion.generate(index, "delta") for index in range(len(completion.prompts))])
        first = await unless_disconnected(request, first_output(stream))
        try:
            completion.checked(*first)
        except BaseException:
            await stream.aclose()
            raise
        return event_stream(completion.chunks(first, stream))


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
        self.server.check_model(body.model)
        self.prompts = body.prompts
        own: dict[str, Any] = {"max_tokens": _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens}
        own["logprobs"] = body.logprobs
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            own["prompt_logprobs"] = body.logprobs
        self.params: SamplingParams = body.sampling_params(self.server.engine.llm.default_params, **own)

    def generate(self, index: int, kind: str) -> AsyncGenerator[RequestOutput, None]:
        prompt = self.prompts[index]
        request: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if self.salt is not None:
            request["cache_salt"] = self.salt
        return self.server.engine.generate(request, self.params, f"{self.id}-{index}", kind, self.priority)

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
        async with aclosing(self.generate(index, "final")) as outputs:
            return self.checked(index, await anext(outputs))

    def checked(self, index: int, output: RequestOutput) -> RequestOutput:
        """Return the output of a prompt. Raise its error, which names the prompt."""
        with naming_param("prompt" if len(self.prompts) == 1 else f"prompt[{index}]"):
            return checked(output)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answers."""
        choices = [
            self._choice(prompt, output, answer, begin=True)
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
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
                latest[prompt] = self.checked(prompt, output)
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
            "model": self.server.name,
            "choices": choices,
        }

    def _choice(
        self, prompt: int, output: RequestOutput, answer: CompletionOutput, begin: bool, start: int = 0
    ) -> dict[str, Any]:
        """Return a choice. `begin`: with the prompt if `echo` asks for it; `start`: characters sent before."""
        echo = begin and bool(self.body.echo)
        text = (self._prompt_text(output) if echo else "") + answer.text
        choice = {
            "index": prompt * self.params.n + answer.index,
            "text": text,
            "logprobs": self._logprobs(output, answer, echo, start),
            "finish_reason": finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": answer.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        tokenizer = self.server.engine.llm.get_tokenizer()
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) if output.prompt is None else output.prompt

    def _logprobs(self, output: RequestOutput, answer: CompletionOutput, echo: bool, start: int) -> dict[str, Any] | None:
        count = self.body.logprobs
        if count is None:
            return None
        ids, entries = list(answer.token_ids), list[Any](answer.logprobs or ())
        if echo:
            ids, entries = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or ()), *entries]
        decode = partial(self.server.engine.llm.get_tokenizer().decode, skip_special_tokens=False)
        return completion_logprobs(ids, entries, count, lambda token: decode([token]), start)


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
