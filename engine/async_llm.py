"""`AsyncLLM`: `LLM` for coroutines of any number of event loops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, Unpack

from ..callers.errors import ConfigError, InputError, short_repr, typed
from ..processors.text.tokenizer import Tokenizer
from .engine import make_engine
from .errors import NotPicklable
from .frontend.adapters import AdapterInfo
from .frontend.request_handle import Abort, RequestHandle
from .frontend.trace import on_request_end
from .frontend.weights import UpdateMode, WeightsSource
from .llm import LLM
from .outputs import RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams
from .session import Turn

if TYPE_CHECKING:
    from .engine_args import EngineArgs
    from .option_types import ChatOptions, LLMOptions

_KINDS = {RequestOutputKind.CUMULATIVE: "cumulative", RequestOutputKind.DELTA: "delta", RequestOutputKind.FINAL_ONLY: "final"}


class AsyncLLM(NotPicklable):
    """A model for coroutines. `async with` closes it, but not an `LLM` that was passed.

    Args:
        model: path of a checkpoint's folder, or an `LLM` to share with synchronous callers.
        max_waiting: maximum number of requests in the engine. Further requests wait, unread, until one ends.
        options: options of `LLM`.

    Attributes:
        output_kind: default of `generate`: "delta", "cumulative" or "final".

    Raises:
        ConfigError, CheckpointError: see `LLM`.
    """

    def __init__(self, model: str | os.PathLike[str] | LLM, max_waiting: int = 1024, **options: Unpack[LLMOptions]) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ConfigError(f"max_waiting={max_waiting!r} must be an integer, 1 or above")
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{next(iter(options))} is an option of the LLM that you pass; set it when you make that LLM")
        self._shared = isinstance(model, LLM)
        self.engine = model.engine if isinstance(model, LLM) else make_engine(model, options)
        self.output_kind = "delta"
        self._slots = _FairSemaphore(max_waiting)

    @property
    def llm(self) -> LLM:
        """The synchronous interface of the same engine."""
        return LLM.of(self.engine)

    def __repr__(self) -> str:
        return self.engine.describe(type(self).__name__)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an AsyncLLM from all options in one object. Its outputs are cumulative by default, as in vLLM."""
        engine = cls(**vars(engine_args))
        engine.output_kind = "cumulative"
        return engine

    def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        output_kind: str | RequestOutputKind | None = None,
        priority: int = 0,
        **chat: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt or one conversation, and yield outputs as the answer grows.

        Closing the generator or cancelling the task aborts the request and frees its memory. If the consumer is slow, one
        output covers several steps. A prompt that cannot be served yields one output with `error`.

        Args:
            prompt: a prompt as in `LLM.generate`, or a list of messages.
            request_id: id in every output, and for `abort`. None lets the engine choose one.
            output_kind: "delta": each output holds the text and tokens since the last one, except those at the end that a
                stop string or a repair may still remove. "cumulative": each output holds the answer so far. "final": one
                output. None takes that of the sampling parameters, else the attribute `output_kind`.
            priority: smaller values are served first. Requests above 0 share one part of `max_total_bytes`.
            chat: with messages, the options of `LLM.chat`: chat_template, tools, mm_processor_kwargs, cache_salt, ...

        Raises:
            InputError: an argument has a wrong type, the request_id is in use, or the engine sleeps or was closed.
        """
        handle = self.engine.request(prompt, sampling_params, priority, request_id, **chat)
        if output_kind is None:
            output_kind = self.output_kind if handle.input.params.output_kind is None else handle.input.params.output_kind
        kind = output_kind if isinstance(output_kind, str) else _KINDS.get(output_kind)
        if kind is None or kind not in _KINDS.values():
            raise InputError(f"output_kind={short_repr(output_kind)} must be one of {', '.join(_KINDS.values())}")
        return self._outputs(handle, kind)

    async def encode_media(self, prompt: object) -> RequestOutput:
        """`LLM.encode_media` of one prompt as a coroutine. Cancelling the task aborts the request."""
        return await self.answer(self.engine.media_request(prompt))

    async def answer(self, handle: RequestHandle) -> RequestOutput:
        """Return the whole answer to a request of `LLM.request`. Cancelling the task aborts the request."""
        if not isinstance(handle, RequestHandle):
            raise InputError(
                f"handle must be what `LLM.request` returns, not {short_repr(handle)}", code="invalid_value", param="handle"
            )
        async with aclosing(self._outputs(handle, "final")) as outputs:
            return await anext(outputs)

    async def append(self, turn: Turn) -> RequestOutput:
        """Return the whole answer of the next turn of a sequence. An error, or cancelling the task, ends the sequence."""
        has_output, handle = asyncio.Event(), turn.handle
        handle.wake = has_output.set
        try:
            await asyncio.wrap_future(self.engine.loop.call(turn.message(self.engine.tokenizer)))
            while True:
                await has_output.wait()
                has_output.clear()
                output = handle.take()
                if output is not None and output.finished:
                    _report(handle)
                    return output
        except BaseException:
            self.engine.loop.drop(handle)
            raise

    def drop(self, handle: RequestHandle) -> None:
        """Abort a request, or end a sequence that is held open, without further output."""
        self.engine.loop.drop(handle)

    async def _outputs(self, handle: RequestHandle, kind: str) -> AsyncGenerator[RequestOutput, None]:
        has_output = asyncio.Event()
        await self._slots.acquire()
        try:
            handle.wake = has_output.set
            self.engine.loop.submit([handle], _LoopPost(asyncio.get_running_loop()), stream=kind != "final")
            try:
                finished = False
                while not finished:
                    await has_output.wait()
                    has_output.clear()
                    output = handle.take(delta=kind == "delta")
                    if output is not None:
                        finished = output.finished
                        if finished:
                            _report(handle)
                        yield output
            finally:
                if not handle.answer.builder.finished:
                    self.engine.loop.drop(handle)
                if not finished:
                    _report(handle)
        finally:
            self._slots.release()

    async def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish reason "abort". Unknown and finished ids are ignored."""
        if not isinstance(request_id, str):
            raise InputError(f"<<param>> must be a string, not {typed(request_id)}", code="invalid_value", param="request_id")
        await asyncio.wrap_future(self.engine.loop.call(Abort(request_id)))

    async def load_adapter(self, name: str, path: str | os.PathLike[str], pin: bool = False) -> AdapterInfo:
        """Do the same as `LLM.load_adapter` without blocking the event loop."""
        return await asyncio.to_thread(self.engine.adapters.load, name, path, pin)

    async def unload_adapter(self, name: str) -> None:
        """Do the same as `LLM.unload_adapter`."""
        await asyncio.to_thread(self.engine.adapters.unload, name)

    async def list_adapters(self) -> Sequence[AdapterInfo]:
        """Return the adapters that requests may choose, in the order of their names."""
        return await asyncio.to_thread(self.engine.adapters.list)

    async def pin_adapter(self, name: str, pinned: bool = True) -> None:
        """Do the same as `LLM.pin_adapter`."""
        await asyncio.to_thread(self.engine.adapters.pin, name, pinned)

    async def update_weights(self, weights: WeightsSource, mode: UpdateMode = "wait") -> int:
        """Do the same as `LLM.update_weights` without blocking the event loop."""
        return await asyncio.to_thread(self.engine.update_weights, weights, mode)

    @property
    def weights_version(self) -> int:
        """Number of `update_weights` so far; 0: the weights are those of the checkpoint."""
        return self.engine.weights_version

    async def sleep(self, level: int = 1) -> None:
        """Do the same as `LLM.sleep` without blocking the event loop."""
        await asyncio.to_thread(self.engine.sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do the same as `LLM.wake_up` without blocking the event loop."""
        await asyncio.to_thread(self.engine.wake_up, tags)

    async def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Do the same as `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self.engine.reset_prefix_cache)

    async def is_sleeping(self) -> bool:
        return self.engine.asleep

    async def check_health(self) -> None:
        """Raise InputError if the engine was closed, EngineDeadError if its process died and was not restarted."""
        self.engine.loop.check_open()

    @property
    def errored(self) -> bool:
        """True if the engine's process died and was not restarted."""
        return self.engine.loop.is_dead

    @property
    def is_running(self) -> bool:
        """True if the engine takes requests."""
        return not (self.engine.loop.closed or self.errored)

    def close(self) -> None:
        """Wait for the running step, then end every request with an error and the engine's threads.

        An `LLM` that was passed belongs to the caller: it goes on, with the requests of this AsyncLLM.
        """
        if not self._shared:
            self.engine.close()

    shutdown = close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


@dataclass(frozen=True)
class _LoopPost:
    """The `post` of requests that wait in one event loop. Equal for the same loop, so that `notify` makes one call per loop."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, handles: list[RequestHandle]) -> None:
        self.loop.call_soon_threadsafe(_wake, handles)


def _report(handle: RequestHandle) -> None:
    """Tell the caller's context what the request has computed."""
    report = on_request_end.get()
    if report is not None:
        with handle.lock:  # the output thread may add to it
            summary = handle.answer.builder.summary()
        report(summary)


def _wake(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.wake()


class _FairSemaphore:
    """A first-come, first-served semaphore for coroutines of several event loops."""

    def __init__(self, free: int) -> None:
        self._free, self._lock = free, threading.Lock()
        self._queue: deque[tuple[asyncio.AbstractEventLoop, Future[None]]] = deque()

    async def acquire(self) -> None:
        turn: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._queue.append((asyncio.get_running_loop(), turn))
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it was granted meanwhile
                self.release()
            raise

    def release(self) -> None:
        with self._lock:
            while self._queue:
                loop, turn = self._queue.popleft()
                if not loop.is_closed() and turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1
