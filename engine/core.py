"""The engine behind its verbs: add, append, truncate, rest, abort, step, sleep, wake. Knows no text, no media and no thread."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..mm.errors import InputError, hint
from ..mm.types import MultiModalFeature, name_item
from .failures import explain
from .quarantine import Quarantine, is_out_of_memory
from .request import Request, State
from .runner import Launched, ModelRunner
from .scheduler import Scheduler
from .source import Source
from .types import (
    EncodeResult,
    EncodeTask,
    EngineRequest,
    EngineStats,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenOutput,
)

ASLEEP = "the engine is asleep; wake() it first"
_NOTHING = SchedulerOutput(step=0, scheduled=())


@dataclass(frozen=True, eq=False)
class _Flight:
    """A step that was started, for sequences as they were then; or why it was not."""

    output: SchedulerOutput
    sequences: Sequence[Request]
    epochs: Sequence[int]
    step: Launched | BaseException

    def wanted(self, scheduler: Scheduler) -> bool:
        """By any of them, or what it was to say beside its rows has to be said again."""
        return isinstance(self.step, BaseException) or any(self.is_wanted(scheduler, i) for i in range(len(self.sequences)))

    def is_wanted(self, scheduler: Scheduler, index: int) -> bool:
        """The sequence is still there, and what was computed is still its next row."""
        request = self.sequences[index]
        there = scheduler.requests.get(request.request_id) is request and request.state is State.RUNNING
        return there and request.epoch == self.epochs[index]


class EngineCore:
    """Every argument and result is plain data that `codec` turns into bytes. Not for use from several threads."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, quarantine: Quarantine, source: Source | None = None) -> None:
        """`source`: of the runner's model; without it there is no sleep."""
        self.scheduler, self.runner, self._quarantine, self._source = scheduler, runner, quarantine, source
        self.asleep = False
        self._encoder_calls = self._disk_hits = 0
        self._asked: dict[str, EncodeTask] = {}  # by hash: items that are being encoded
        self.idle = True  # the last step found nothing to do
        self._flight: _Flight | None = None  # a step whose tokens nobody has looked at

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence.

        Raises:
            InputError: a prompt that is empty or too long, a token outside the vocabulary, misplaced items, an item that
                broke the encoder a short while ago, a grammar that cannot be compiled, an adapter that is not there, an engine
                that is asleep.
        """
        if self.asleep:
            raise InputError(ASLEEP)
        params = request.params
        self._check_tokens("prompt_token_ids", request.prompt_token_ids)
        self._check_tokens("stop_token_ids", params.stop_ids)
        self._check_tokens("logit_bias", params.logit_bias or {})
        self._check_tokens("bad_words", (token for word in request.bad_word_ids for token in word))
        self._check_tokens("pooling", () if request.pooling is None else request.pooling.token_ids)
        if params.structured_outputs is not None:
            self.runner.check_grammar(params.structured_outputs)
        self._check_adapter(request.adapter)
        self._check_items(request.features if request.cross is None else (*request.features, request.cross))
        self.scheduler.add(request)

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None:
        """Continue a sequence with these tokens, items placed in its own token count; a new answer follows.

        `close`: the sequence ends with that answer; without tokens, as soon as it is idle. `adapter`: what computes all of the
        sequence from now on; None: what did before.

        Raises:
            InputError: an unknown sequence or adapter, one too long, a token outside the vocabulary, misplaced items.
        """
        self._check_tokens("token_ids", token_ids)
        self._check_items(features)
        self._check_adapter(adapter or "")
        self.scheduler.append(request_id, token_ids, features, close, adapter)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Roll a sequence back to its first `num_tokens` tokens, cache included; InputError if that cuts an item."""
        self.scheduler.truncate(request_id, num_tokens)

    def rest(self, request_id: str) -> None:
        """End the answer of a sequence that is held open, as it stands; InputError for an unknown one."""
        self.scheduler.rest(request_id)

    def abort(self, request_id: str) -> None:
        """Forget a sequence and free all it holds; unknown ones are ignored. The worker frees its part with the next step."""
        self.scheduler.abort(request_id)

    def sleep(self) -> None:
        """Give back all memory that `wake` can take again; caches are forgotten. Harmless where it sleeps.

        Raises:
            InputError: there are sequences, or nothing to wake up from.
        """
        if self._source is None:
            raise InputError("an engine whose model came from no checkpoint cannot sleep")
        if self.scheduler.requests:
            raise InputError(f"{len(self.scheduler.requests)} sequences are being served; end them, then sleep()")
        if not self.asleep:
            for pool in self.scheduler.kv.pools:
                pool.forget_kept()
            self.scheduler.encoder.forget_all()
            self.scheduler.schedule()  # what the runner was to be told: it forgets all of it
            self._flight, self.asleep = None, True
            self.runner.sleep(self._source.empty())

    def wake(self) -> None:
        """Take memory, and read the weights from the checkpoint again. Harmless where it is awake; if it fails, it sleeps on.

        Raises:
            CheckpointError: the checkpoint was changed since it was loaded, or cannot be read.
            InputError: there is too little memory.
        """
        if not self.asleep:
            return
        assert self._source is not None
        try:
            self.runner.wake(self._source.again)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was made until then
            self.runner.sleep(self.runner.model)
            if not is_out_of_memory(error):
                raise
            raise InputError("there is too little memory to wake up; make room on the device, then wake() again") from None
        self.asleep = False

    def step(self) -> tuple[TokenOutput, ...]:
        """Compute one batch; what it added, by sequence. An exception ends the sequences of this step only.

        Where the runner overlaps, the next step is on its way before the tokens of this one are looked at, if it is only a
        row more for each sequence. What it computed for those that have ended meanwhile is forgotten.
        """
        flight, self._flight = self._flight, None
        if flight is None or not flight.wanted(self.scheduler):
            flight = self._launch(self.scheduler.schedule())
        self.idle = flight is None
        if flight is None:
            return ()
        self._flight = self._launch_after(flight)
        return self._collect(flight)

    def _launch(self, output: SchedulerOutput | None, after: Launched | None = None) -> _Flight | None:
        """None if there is nothing to do."""
        if output is None or (output == replace(_NOTHING, step=output.step) and not self.scheduler.encoder.coming):
            return None
        if output.encode:  # those that were dropped on their way are not heard of any more
            coming = {key: task for key, task in self._asked.items() if key in self.scheduler.encoder.coming}
            self._asked = coming | {task.hash: task for task in output.encode}
        sequences = [self.scheduler.requests[task.request_id] for task in output.scheduled]
        epochs = [request.epoch for request in sequences]
        try:
            return _Flight(output, sequences, epochs, self.runner.launch(output, after))
        except BaseException as error:
            return _Flight(output, sequences, epochs, error)

    def _launch_after(self, flight: _Flight) -> _Flight | None:
        """The step after that one; None if it has to wait for its tokens."""
        step = flight.step
        if isinstance(step, BaseException) or step.tokens is None:
            return None
        return self._launch(self.scheduler.ahead(flight.output), step)

    def _collect(self, flight: _Flight) -> tuple[TokenOutput, ...]:
        output = flight.output
        try:
            if isinstance(flight.step, BaseException):
                raise flight.step
            done = flight.step.collect()
        except BaseException as error:
            if isinstance(error, Exception):
                self.scheduler.redeliver(output)
            else:  # the caller's interrupt: sequences go on, and the step after has none of the tokens they lack now
                after, self._flight = self._flight, None
                if after is not None and isinstance(after.step, BaseException):
                    self._lose(after.output)
                self._lose(output)
                raise
            told = explain(error, "a step")
            unmade = tuple(EncodeResult(task.hash, "", told) for task in output.encode)
            done = StepOutput(tuple(TokenOutput(task.request_id, (), error=told) for task in output.scheduled), unmade)
        broken = self._book_items(done)
        wanted = [flight.is_wanted(self.scheduler, i) for i in range(len(output.scheduled))]  # booking one changes no other
        pairs = zip(wanted, output.scheduled, done.tokens, strict=True)
        results = [self._book(task, result) for good, task, result in pairs if good]
        return (*results, *self._fail_others(broken))

    @property
    def stats(self) -> EngineStats:
        """Counts since the start, and what is held now."""
        return replace(
            self.scheduler.stats,
            encoder_calls=self._encoder_calls,
            encoder_disk_hits=self._disk_hits,
            quarantined=len(self._quarantine),
        )

    def _lose(self, output: SchedulerOutput) -> None:
        """The step broke off: nobody knows which items were encoded, or what was freed."""
        for task in output.encode:
            self._asked.pop(task.hash, None)
            self.scheduler.encoder.fail(task.hash)
        self.scheduler.redeliver(output)

    def _book_items(self, done: StepOutput) -> list[tuple[EncodeTask, EncodeResult]]:
        """Of items that were encoded; those that could not be."""
        broken = []
        for result in done.encoded:
            task = None if result.source == "dropped" else self._asked.pop(result.hash, None)
            if task is None:  # nobody asks for it any more
                self._encoder_calls += result.source != "disk" and result.error is None
                continue
            request = self.scheduler.requests.get(task.request_id)
            if request is not None:
                request.encode_seconds += result.seconds
            self.scheduler.encoder.arrive(result.hash)
            if result.error is not None:
                broken.append((task, result))
                self.scheduler.encoder.fail(result.hash)
                if result.poison:
                    self._quarantine.add(result.hash)
            elif result.source == "disk":
                self._disk_hits += 1
                if request is not None:
                    request.sources[task.index] = "disk"
            else:
                self._encoder_calls += 1
        return broken

    def _book(self, task: ScheduledRequest, result: TokenOutput) -> TokenOutput:
        request = self.scheduler.requests[task.request_id]
        if result.error is not None:
            self.scheduler.abort(task.request_id, unclean=True)
            return _ended(request, replace(result, finish_reason="error"))
        done = self.scheduler.advance(task, result.token_ids, whole=result.pooled is not None)
        if done.num_removed:  # the newest of them was never shown
            return replace(result, token_ids=(), logprobs=None, num_removed=done.num_removed - 1)
        if done.finish_reason is None:
            return result
        return _ended(request, replace(result, finish_reason=done.finish_reason, stop_reason=done.stop_token))

    def _fail_others(self, broken: Sequence[tuple[EncodeTask, EncodeResult]]) -> list[TokenOutput]:
        """Sequences that were not in this step and hold an item that broke the encoder, or asked for one that failed."""
        failed = []
        for task, result in broken:
            names = self.scheduler.encoder.holders(result.hash) if result.poison else [task.request_id]
            for request in [self.scheduler.requests[name] for name in names if name in self.scheduler.requests]:
                self.scheduler.abort(request.request_id)
                error = f"{name_item(request.features, result.hash)}: {result.error}"
                failed.append(_ended(request, TokenOutput(request.request_id, (), finish_reason="error", error=error)))
        return failed

    def _check_items(self, features: Sequence[MultiModalFeature]) -> None:
        for feature in features:
            self._quarantine.check(feature.hash, name_item(features, feature.hash))

    def _check_adapter(self, name: str) -> None:
        known = self.runner.model.adapters
        if name and name not in known:
            raise InputError(f"no adapter {name!r}; {hint(name, known)}")

    def _check_tokens(self, what: str, token_ids: Iterable[int]) -> None:
        vocab = self.runner.model.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab:
                raise InputError(f"{what} holds {token}; the vocabulary has the ids 0 to {vocab - 1}")


def _ended(request: Request, result: TokenOutput) -> TokenOutput:
    return replace(result, timings=request.timings(), stats=request.stats())
