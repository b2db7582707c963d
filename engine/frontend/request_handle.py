"""The frontend's handle of one request, from the call to its last output, and the messages to the loop that serves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from ...callers.errors import EngineDeadError, ErrorInfo, InputError
from ...mm.types import MultiModalFeature
from ...processors.text.tokenizer import Tokenizer
from ..core.client import CoreClient
from ..errors import error_info
from ..outputs import RequestOutput
from ..sampling_params import SamplingLimits
from ..seeds import splitmix64
from ..types import EngineRequest
from .input_processor import ParsedPrompt
from .input_queue import QueueEntry
from .output_processor import OutputBuilder
from .processed_prompt import ProcessedPrompt
from .request import Answer, Closing, RequestInput, tokenize_bad_words, tokenize_draft
from .weights import UpdateMode


@dataclass(eq=False, repr=False)
class RequestHandle:
    """A request from the call to its last output.

    The loop's thread only appends events to the answer's inbox. `read` and `take` turn them into text, stop strings and log
    probabilities, in the caller's thread or the output thread.

    Args:
        input: may be replaced until the request is submitted.
        wake: wakes the coroutine that waits for output; called by the `post` of AsyncLLM.

    Attributes:
        number: -1 until the request is submitted.
        name: the request's id.
        post: called with the requests that have new output.
        stream: post also before the answer is finished.
        messages: the queue of the loop.
        answer: of the current turn.
        keep: the sequence is held open.
        posted: the caller was notified and has not called `take` yet.
    """

    input: RequestInput
    wake: Callable[[], None] = lambda: None
    # set by `register`
    number: int = field(default=-1, init=False)
    name: str = field(default="", init=False)
    post: Callable[[list[RequestHandle]], None] = field(init=False)
    stream: bool = field(default=False, init=False)
    messages: SimpleQueue[Message | None] = field(init=False)
    entry: QueueEntry | None = field(default=None, init=False)
    keep: bool = field(default=False, init=False)
    answer: Answer = field(init=False)
    # while it is served
    bad_word_ids: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    draft_token_ids: tuple[int, ...] = field(default=(), init=False)
    posted: bool = field(default=False, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def register(
        self,
        number: int,
        name: str,
        tokenizer: Tokenizer,
        post: Callable[[list[RequestHandle]], None],
        stream: bool,
        messages: SimpleQueue[Message | None],
    ) -> None:
        """Attach the request to a loop, whose queue `messages` is."""
        self.number, self.name, self.post, self.stream, self.messages = number, name, post, stream, messages
        self.keep, self.answer = self.input.hold_open, Answer(OutputBuilder(name, self.input.params, tokenizer))

    def read_prompt(self, tokenizer: Tokenizer, limits: SamplingLimits) -> ProcessedPrompt | ParsedPrompt:
        """Check limits, load the adapter, parse the prompt, tokenise bad words and the draft: the loop need not wait."""
        limits.check(self.input.params)
        if self.input.adapter is not None:
            self.input.adapter.load()
        self.draft_token_ids = tokenize_draft(self.input, tokenizer)
        self.bad_word_ids = tokenize_bad_words(self.input.params, tokenizer)
        prompt = self.input.prepare()
        if self.input.adapter is None and self.input.default_adapter is not None:
            lease = self.input.default_adapter(prompt.modalities)
            if lease is not None:
                self.input = replace(self.input, adapter=lease)
                lease.load()
        return prompt

    def admit(self, prompt: ProcessedPrompt | Exception) -> None:
        """Tell the loop that the prompt was processed, or why it cannot be served."""
        self.messages.put(Admit(self, prompt))

    @property
    def open_sequence(self) -> str:
        """Id of the sequence that is held open. Raises InputError if it has ended."""
        if not self.keep:
            raise InputError("the live session has ended; begin a new one")
        (name,) = self.answer.builder.answers
        return name

    @property
    def is_idle_session(self) -> bool:
        """True if the sequence is held open between two answers."""
        return self.keep and self.entry is None

    def sequences(self, prepared: ProcessedPrompt, eos_token_ids: tuple[int, ...], seed: int) -> Iterator[EngineRequest]:
        """Yield one EngineRequest per answer. `seed`: the engine's seed, for a request without one."""
        params = self.input.params
        base = params.seed if params.seed is not None else splitmix64(splitmix64(seed) + self.number)
        first = others = params
        if params.n > 1:  # copied without checks, which take a second for long lists of tokens
            first = copy(params)
            first.n = 1
            others = copy(first)
            others.prompt_logprobs = None
        for i, name in enumerate(self.answer.builder.answers):
            yield EngineRequest(
                name,
                prepared.token_ids,
                others if i else first,
                eos_token_ids,
                self.input.adapted(prepared.features),
                priority=self.input.priority,
                seed=splitmix64(splitmix64(base) ^ i),
                bad_word_ids=self.bad_word_ids,
                hold_open=self.input.hold_open,
                salt=prepared.salt,
                adapter=prepared.adapter if self.input.adapter is None else self.input.adapter.identity,
                cross=self.input.adapted(prepared.cross),
                pooling=self.input.pooling,
                draft_token_ids=self.draft_token_ids,
                first_tokens=self.input.first_tokens,
            )

    def read(self) -> None:
        """Move the events of the inbox into the builder."""
        with self.lock:
            self._read()

    def take(self, delta: bool = False) -> RequestOutput | None:
        """Return all output so far, with `delta` only what is new since the last call; None if nothing is new."""
        with self.lock:
            self.posted = False
            self._read()
            builder = self.answer.builder
            if not builder.changed:
                return None
            builder.changed = False
            if builder.finished and not self.keep:
                self.post = _ignore  # another post would put the request into the mail that `post` holds: a reference cycle
            try:
                return builder.output(delta)
            except Exception as error:  # text that cannot be decoded fails this request only
                self._fail(error)
                builder.changed = False
                builder.freeze()
                return builder.output(delta)

    def _read(self) -> None:
        answer = self.answer
        answer.unread = False
        while answer.inbox:
            event = answer.inbox.popleft()
            if isinstance(event, ProcessedPrompt):
                answer.builder.start(event)
            elif isinstance(event, Closing):
                timings = answer.builder.timings
                waited = answer.times.queue_seconds(answer.builder.prepared.timings)
                timings["queue"] = timings.get("queue", 0.0) + waited
                answer.builder.close(event.reason, event.error)
            elif not answer.builder.finished:
                try:
                    if answer.builder.add(event):  # tokens that the core computes after a stop string are dropped
                        name = event.request_id
                        self.messages.put(Stop(self, name, answer.builder.num_tokens(name)))
                except Exception as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        info = error_info(error, "writing an answer")
        self.answer.builder.close("error", info)
        self.messages.put(End(self, "error", info))


def _ignore(handles: list[RequestHandle]) -> None:
    """The `post` of a request whose caller has its last output."""


def notify(handles: Iterable[RequestHandle]) -> list[RequestHandle]:
    """Notify each caller, once, of its requests that have new output. Return the requests whose caller is gone."""
    by_post: dict[Callable[[list[RequestHandle]], None], list[RequestHandle]] = {}
    for handle in handles:
        handle.posted = True
        by_post.setdefault(handle.post, []).append(handle)
    orphans = []
    for post, updated in by_post.items():
        try:
            post(updated)
        except RuntimeError:  # the caller's event loop is closed
            orphans += updated
    return orphans


class ServingLoop(Protocol):
    """The methods of an EngineLoop that messages call."""

    core: CoreClient
    asleep: bool

    @property
    def is_dead(self) -> bool: ...

    def admit(self, handle: RequestHandle, prompt: ProcessedPrompt | Exception) -> None: ...

    def stop(self, handle: RequestHandle, name: str, num_tokens: int) -> None: ...

    def end(self, handles: Collection[RequestHandle], reason: str, error: ErrorInfo | None = None) -> None: ...

    def drop_now(self, *handles: RequestHandle) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def append(self, message: Append) -> None: ...

    def fall_asleep(self) -> None: ...

    def update_weights(self, weights: Mapping[str, Tensor], mode: UpdateMode) -> None: ...

    def read_stats(self) -> None: ...

    def send_after(self, holder: object, message: Message) -> None: ...


Message = Callable[[ServingLoop], Any]
"""A function that a loop's thread calls between two steps. Unread, it does not keep the loop alive."""


@dataclass(frozen=True)
class AwaitedMessage:
    """A message whose sender waits for what it returns or raises."""

    message: Message
    result: Future[Any]

    def __call__(self, engine_loop: ServingLoop) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            value = self.message(engine_loop)
            engine_loop.read_stats()
            self.result.set_result(value)
        except EngineDeadError as error:
            self.result.set_exception(error)
            raise
        except Exception as error:
            self.result.set_exception(error)


@dataclass(frozen=True)
class Admit:
    """A prompt was processed, or failed: hand its request to the core, or end it."""

    handle: RequestHandle
    prompt: ProcessedPrompt | Exception

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.admit(self.handle, self.prompt)


@dataclass(frozen=True)
class Stop:
    """End a sequence at a stop string, after `num_tokens` of its tokens."""

    handle: RequestHandle
    sequence: str
    num_tokens: int

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.stop(self.handle, self.sequence, self.num_tokens)


@dataclass(frozen=True)
class End:
    """End a request. Its caller gets a last output with this finish reason."""

    handle: RequestHandle
    reason: str
    error: ErrorInfo | None = None

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.end([self.handle], self.reason, self.error)


@dataclass(frozen=True)
class Drop:
    """Abort requests without further output."""

    handles: tuple[RequestHandle, ...]

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.drop_now(*self.handles)


@dataclass(frozen=True)
class Abort:
    """End the request with this id with the finish reason "abort". Unknown and finished ids are ignored."""

    request_id: str

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.abort(self.request_id)


@dataclass(frozen=True)
class CheckCore:
    """Notice that the core's process has ended, if it has and the loop does not know it yet."""

    def __call__(self, engine_loop: ServingLoop) -> None:
        if not engine_loop.is_dead:
            engine_loop.core.check_alive()


@dataclass(frozen=True)
class Append:
    """Add tokens and items to a sequence that is held open, and begin its next answer.

    Args:
        builder: collects that answer.
        adapter: as in RequestUpdate.
        close: end the sequence with that answer.
    """

    handle: RequestHandle
    builder: OutputBuilder
    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...]
    adapter: str | None = None
    close: bool = False

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.append(self)


@dataclass(frozen=True)
class Truncate:
    """Roll a sequence that is held open back to its first tokens."""

    handle: RequestHandle
    num_tokens: int

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.core.truncate(self.handle.open_sequence, self.num_tokens)


@dataclass(frozen=True)
class ResetPrefixCache:
    """Free all KV blocks that are kept for reuse. Returns False if blocks of running sequences remain."""

    def __call__(self, engine_loop: ServingLoop) -> bool:
        return engine_loop.core.reset_prefix_cache()


@dataclass(frozen=True)
class CancelLoading:
    """Call `EngineCore.cancel_loading`."""

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.core.cancel_loading()


@dataclass(frozen=True)
class UnloadAdapter:
    """Call `EngineCore.unload_adapter`."""

    identity: str

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.core.unload_adapter(self.identity)


@dataclass(frozen=True)
class Sleep:
    """Call `EngineCore.sleep`. Raises InputError while there are requests or live sessions."""

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.fall_asleep()


@dataclass(frozen=True)
class UpdateWeights:
    """Call `EngineLoop.update_weights`."""

    weights: Mapping[str, Tensor]
    mode: UpdateMode

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.update_weights(self.weights, self.mode)


@dataclass(frozen=True)
class WakeUp:
    """Call `EngineCore.wake_up`."""

    def __call__(self, engine_loop: ServingLoop) -> None:
        engine_loop.core.wake_up()
        engine_loop.asleep = False
