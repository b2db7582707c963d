"""`AsyncLLM`: the engine of `LLM` for coroutines of any number of event loops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ..mm.errors import ConfigError, InputError
from .frontend.request_handle import RequestHandle
from .llm import LLM
from .sampling_params import SamplingParams
from .types import RequestOutput

KINDS = ("delta", "cumulative", "final")


class AsyncLLM:
    """A model that answers coroutines; `async with` closes it.

    Args:
        model: folder of a checkpoint, or an `LLM` that is shared with callers that are not asynchronous.
        max_waiting: requests the engine holds at most; further ones wait for their turn before they are looked at.
        options: those of `LLM`.

    Raises:
        ConfigError, CheckpointError: as `LLM`.
    """

    def __init__(self, model: str | os.PathLike[str] | LLM, max_waiting: int = 1024, **options: Any) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ConfigError(f"max_waiting={max_waiting!r} must be an integer, 1 or above")
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{next(iter(options))} is an option of the LLM that was given; set it there")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._engine_loop = self.llm._engine_loop
        self._places = _Places(max_waiting)

    def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        output_kind: str = "delta",
        priority: int = 0,
        **chat: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one prompt, as `LLM.generate` takes it, or (a list of messages) to one conversation, as it grows.

        Leaving the loop, closing the generator or cancelling the task ends the request and frees what it holds. Whoever
        is slow to ask for the next output gets all that came in between in one. A prompt that cannot be served has one
        output with `error`, as with `LLM`.

        Args:
            request_id: for `abort`, and in every output; None for one of ours.
            output_kind: "delta": each output holds what is new since the one before, text and tokens that may yet be taken
                back (stop strings) not among it; "cumulative": all so far; "final": one output, the whole answer.
            priority: smaller is served first.
            chat: with messages, what `LLM.chat` takes beside them: chat_template, tools, mm_processor_kwargs, cache_salt, ...

        Raises:
            InputError: an argument of a wrong type, a request_id that is in use, a closed engine.
        """
        if output_kind not in KINDS:
            raise InputError(f"output_kind={output_kind!r} must be one of {', '.join(KINDS)}")
        return self._outputs(self.llm.request(prompt, sampling_params, priority, request_id, **chat), output_kind)

    async def answer(self, handle: RequestHandle) -> RequestOutput:
        """The whole answer to a request of `LLM.request`. Cancelling ends it, as with `generate`."""
        async with aclosing(self._outputs(handle, "final")) as outputs:
            return await anext(outputs)

    async def _outputs(self, handle: RequestHandle, kind: str) -> AsyncGenerator[RequestOutput, None]:
        news = asyncio.Event()
        await self._places.take()
        try:
            handle.ring = news.set
            self._engine_loop.submit([handle], _Port(asyncio.get_running_loop()), stream=kind != "final")
            try:
                finished = False
                while not finished:
                    await news.wait()
                    news.clear()
                    output = handle.take(delta=kind == "delta")
                    if output is not None:
                        finished = output.finished
                        yield output
            finally:
                if not handle.builder.finished:
                    self._engine_loop.drop(handle)
        finally:
            self._places.give()

    async def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish reason "abort". Unknown and finished ones are ignored."""
        await asyncio.wrap_future(self._engine_loop.call(lambda engine_loop: engine_loop.abort(request_id)))

    async def sleep(self) -> None:
        """As `LLM.sleep`."""
        await asyncio.wrap_future(self._engine_loop.sleep())

    async def wake_up(self) -> None:
        """As `LLM.wake_up`; other coroutines run meanwhile."""
        await asyncio.wrap_future(self._engine_loop.wake_up())

    def close(self) -> None:
        """End every request with an error, and the engine's threads. Waits for the step that is being computed."""
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


@dataclass(frozen=True)
class _Port:
    """Where the engine's thread leaves news for one event loop: one call for all of its requests."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, handles: list[RequestHandle]) -> None:
        self.loop.call_soon_threadsafe(_ring, handles)


def _ring(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.ring()


class _Places:
    """A semaphore for coroutines of several event loops, first come first served."""

    def __init__(self, free: int) -> None:
        self._free, self._lock = free, threading.Lock()
        self._line: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = loop.create_future()
            self._line.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                waiting = (loop, turn) in self._line
                if waiting:
                    self._line.remove((loop, turn))
            if not waiting:
                self.give()
            raise

    def give(self) -> None:
        with self._lock:
            while self._line:
                loop, turn = self._line.popleft()
                try:
                    loop.call_soon_threadsafe(_grant, turn)
                    return
                except RuntimeError:  # that event loop is closed
                    continue
            self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
