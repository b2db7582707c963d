"""The frontend's handle of one request, from the call to its last output."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ...mm.errors import ErrorInfo
from ...mm.pacing import releasing_gil
from ...processors.text.tokenizer import Tokenizer
from ..errors import error_info
from ..pooling_params import PoolingParams
from ..sampling_params import SamplingLimits, SamplingParams
from ..seeds import splitmix64
from ..types import EngineRequest, RequestOutput, TokenOutput
from .input_processor import ParsedPrompt
from .input_queue import QueueEntry
from .output_processor import OutputBuilder
from .processed_prompt import ProcessedPrompt
from .trace import RequestTimes


@dataclass(frozen=True)
class Closing:
    """Last event of an answer. Completions without a finish reason get `reason`."""

    reason: str
    error: ErrorInfo | None


@dataclass(eq=False, repr=False)
class RequestHandle:
    """A request and its output so far.

    The loop's thread only appends events to `inbox`. `read` and `take` turn them into text, stop strings and log
    probabilities, in the caller's thread or the output thread.

    Args:
        prepare: parses the prompt; runs in a thread of the input queue.
        priority: smaller values are served first.
        has_files, salt: as in QueueEntry.
        request_id: None lets the engine choose one.
        keep: hold the sequence open after an answer, see `EngineRequest.hold_open`; False once the sequence has ended.
        pooling: what to return instead of an answer.
        wake: wakes the coroutine that waits for output; called by the `post` of AsyncLLM.
    """

    prepare: Callable[[], ProcessedPrompt | ParsedPrompt]
    params: SamplingParams
    priority: int = 0
    request_id: str | None = None
    keep: bool = False
    pooling: PoolingParams | None = None
    wake: Callable[[], None] = lambda: None
    has_files: bool = False
    salt: str | None = None

    # set by `register`
    number: int = field(default=-1, init=False)
    name: str = field(default="", init=False)
    post: Callable[[list[RequestHandle]], None] = field(init=False)  # called with the requests that have new output
    stream: bool = field(default=False, init=False)  # post also before the answer is finished
    commands: SimpleQueue[Any] = field(init=False)
    builder: OutputBuilder = field(init=False)
    entry: QueueEntry | None = field(default=None, init=False)
    bad_word_ids: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    times: RequestTimes = field(default_factory=RequestTimes, init=False)

    # written by the loop's thread
    inbox: deque[ProcessedPrompt | TokenOutput | Closing] = field(default_factory=deque, init=False)
    open: set[str] = field(default_factory=set, init=False)  # sequences whose answer is not finished
    closed: bool = field(default=False, init=False)  # the inbox has its Closing
    posted: bool = field(default=False, init=False)  # the caller was notified and has not called `take` yet
    unread: bool = field(default=False, init=False)  # queued for the output thread
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # guards the builder

    def register(
        self,
        number: int,
        name: str,
        tokenizer: Tokenizer,
        post: Callable[[list[RequestHandle]], None],
        stream: bool,
        commands: SimpleQueue[Any],
    ) -> None:
        """Attach the request to a loop. `commands`: the loop's queue of functions that take the EngineLoop."""
        self.number, self.name, self.post, self.stream, self.commands = number, name, post, stream, commands
        self.begin_turn(OutputBuilder(name, self.params, tokenizer))

    def begin_turn(self, builder: OutputBuilder) -> None:
        """Begin an answer: the first one, or the next one of a kept sequence."""
        self.builder, self.times, self.closed = builder, RequestTimes(), False
        self.open = set(builder.answers)

    def read_prompt(self, tokenizer: Tokenizer, limits: SamplingLimits) -> ProcessedPrompt | ParsedPrompt:
        """Check limits, parse the prompt and tokenise bad words, so that the loop need not wait for it."""
        limits.check(self.params)
        self.bad_word_ids = tokenize_bad_words(self.params, tokenizer)
        return self.prepare()

    def sequences(self, prepared: ProcessedPrompt, eos_token_ids: tuple[int, ...], seed: int) -> Iterator[EngineRequest]:
        """Yield one EngineRequest per answer. `seed`: the engine's seed, for a request without one."""
        params = self.params
        base = params.seed if params.seed is not None else splitmix64(splitmix64(seed) + self.number)
        first = others = params
        if params.n > 1:  # copied without checks, which take a second for long lists of tokens
            first = copy(params)
            first.n = 1
            others = copy(first)
            others.prompt_logprobs = None
        for i, name in enumerate(self.builder.answers):
            yield EngineRequest(
                name,
                prepared.token_ids,
                others if i else first,
                eos_token_ids,
                prepared.features,
                priority=self.priority,
                seed=splitmix64(splitmix64(base) ^ i),
                bad_word_ids=self.bad_word_ids,
                hold_open=self.keep,
                salt=prepared.salt,
                adapter=prepared.adapter,
                cross=prepared.cross,
                pooling=self.pooling,
            )

    @property
    def stops_and_repairs(self) -> bool:
        """True if the request has stop strings and the core may remove tokens from its answer."""
        detection = self.params.repetition_detection
        return bool(self.params.stop) and detection is not None and detection.repair

    def read(self) -> None:
        """Move the events of the inbox into the builder."""
        with self.lock:
            self._read()

    def take(self, delta: bool = False) -> RequestOutput | None:
        """Return all output so far, with `delta` only what is new since the last call; None if nothing is new."""
        with self.lock:
            self.posted = False
            self._read()
            if not self.builder.changed:
                return None
            self.builder.changed = False
            if self.builder.finished and not self.keep:
                self.post = _ignore  # another post would put the request into the mail that `post` holds: a reference cycle
            try:
                return self.builder.output(delta)
            except Exception as error:  # text that cannot be decoded fails this request only
                self._fail(error)
                self.builder.changed = False
                self.builder.freeze()
                return self.builder.output(delta)

    def _read(self) -> None:
        self.unread = False
        while self.inbox:
            event = self.inbox.popleft()
            if isinstance(event, ProcessedPrompt):
                self.builder.start(event)
            elif isinstance(event, Closing):
                waited = self.times.queue_seconds(self.builder.prepared.timings)
                self.builder.timings["queue"] = self.builder.timings.get("queue", 0.0) + waited
                self.builder.close(event.reason, event.error)
            elif not self.builder.finished:
                try:
                    if self.builder.add(event):
                        self._stop(event.request_id)
                except Exception as error:
                    self._fail(error)

    def _stop(self, name: str) -> None:
        """End a sequence at a stop string. Tokens that the core computes after it are dropped."""
        num_tokens = self.builder.num_tokens(name)
        self.commands.put(lambda engine_loop: engine_loop.stop(self, name, num_tokens))

    def _fail(self, error: Exception) -> None:
        info = error_info(error, "writing an answer")
        self.builder.close("error", info)
        self.commands.put(lambda engine_loop: engine_loop.end([self], "error", info))


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


def drop_command(handle: RequestHandle) -> Callable[[Any], None]:
    """Return a command that drops the request. The command holds no reference to the loop."""
    return lambda engine_loop: engine_loop.drop_now(handle)


def tokenize_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each bad word, at the start of a text and after a space.

    The result is kept in `params`, which all requests of a call share.
    """
    given = tuple(params.bad_words or ())
    if not given:
        return ()
    kept = params.__dict__.get("bad_word_ids")
    if kept is None or kept[0] != given:
        spelled = (text for word in given for text in (word.lstrip(), " " + word.lstrip()))
        ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in releasing_gil(spelled))
        kept = params.__dict__["bad_word_ids"] = given, tuple(dict.fromkeys(filter(None, ids)))
    return kept[1]  # type: ignore[no-any-return]
