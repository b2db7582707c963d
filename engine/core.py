"""The engine's core. It queues sequences and computes them step by step.

Callers use its verbs only: add, append, truncate, pause, abort, step, sleep and wake_up, see `core_client.CoreClient`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch

from ..mm.embeddings import PROMPT_EMBEDS
from ..mm.errors import InputError, hint, is_out_of_memory
from ..mm.tenants import tenant_of
from ..mm.types import MultiModalFeature, find_item
from ..models.interface import Model, SupportsClassification, SupportsPooling
from .core_client import ASLEEP
from .errors import error_info
from .scheduler.quarantine import Quarantine
from .scheduler.request import Request, State
from .scheduler.scheduler import Scheduler
from .threads import use_threads
from .types import (
    CoreInfo,
    CoreOutputs,
    EncodeResult,
    EncodeTask,
    EngineRequest,
    EngineStats,
    SchedulerOutput,
    StepOutput,
    TokenOutput,
)
from .worker.grammar import GrammarFactory
from .worker.model_runner import AsyncStepOutput, ModelRunner

_SNAPSHOT_SECONDS = 0.05  # maximum age of a snapshot of the statistics while no sequence begins or ends
_NOTHING = SchedulerOutput(step=0, scheduled=())


class ModelReloader(Protocol):
    """Builds the runner's model again, for `sleep` and `wake_up`."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of items that the model takes."""

    def build_on_meta(self) -> Model:
        """Return the model without memory."""

    def reload(self) -> Model:
        """Return the model on its device, with its weights."""


@dataclass(frozen=True, eq=False)
class _Flight:
    """A step that was launched, with its sequences and their epochs at that time; `step` is an error if the launch failed."""

    output: SchedulerOutput
    sequences: Sequence[Request]
    epochs: Sequence[int]
    step: AsyncStepOutput | BaseException

    def wanted(self, scheduler: Scheduler) -> bool:
        """True if any result is still needed, or if the launch failed and its side messages must be sent again."""
        return isinstance(self.step, BaseException) or any(self.is_wanted(scheduler, i) for i in range(len(self.sequences)))

    def is_wanted(self, scheduler: Scheduler, index: int) -> bool:
        """True if the sequence still runs and the computed row is still its next one."""
        request = self.sequences[index]
        is_running = scheduler.requests.get(request.request_id) is request and request.state is State.RUNNING
        return is_running and request.epoch == self.epochs[index]


class EngineCore:
    """Scheduler and model runner behind the verbs of `CoreClient`, in this process.

    Arguments and results are plain data that `codec` can encode.
    """

    restart = None  # the core lives as long as its process

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, quarantine: Quarantine, source: ModelReloader | None = None
    ) -> None:
        """Without `source`, which reloads the runner's model, the engine cannot sleep."""
        self.scheduler, self.runner, self._quarantine, self._source = scheduler, runner, quarantine, source
        self.info = _info(scheduler, runner, source)
        self.asleep = False
        # called with the hashes of the items being encoded, whenever these change
        self.report_encoding: Callable[[Iterable[str]], object] = lambda keys: None
        self._encoder_calls = self._disk_hits = 0
        self._encode_tasks: dict[str, EncodeTask] = {}  # items that are being encoded, by hash
        self._flight: _Flight | None = None  # a launched step whose tokens are not recorded yet
        self._compiling: dict[str, tuple[EngineRequest, Future[Any]]] = {}  # requests whose grammar is being compiled
        self._checked: dict[str, Collection[Any]] = {}  # the token ids last checked, by parameter
        self._grammars: dict[str, Future[Any]] = {}  # keeps the grammars of unfinished requests alive
        self._snapshot, self._snapshot_time, self._snapshot_counts = EngineStats(), 0.0, (0, 0, 0, 0)

    def bind_thread(self, num_threads: int) -> None:
        """Set torch's threads and the GPU of the calling thread, which will call `step`."""
        use_threads(num_threads)
        if self.runner.device.type == "cuda":
            torch.cuda.set_device(self.runner.device)

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence. If its grammar has to be compiled, this runs in another thread and the sequence waits for it.

        Raises:
            InputError: an empty or too long prompt, a token outside the vocabulary, misplaced items, an item in quarantine,
                an invalid grammar, an unknown adapter, or a sleeping engine.
        """
        if self.asleep:
            raise InputError(ASLEEP, code="engine_asleep")
        params, pooling = request.params, request.pooling
        if pooling is not None and pooling.pooling is None and not pooling.candidates:
            request = replace(request, pooling=replace(pooling, pooling=self.info.pooling))
        self._check_tokens("prompt_token_ids", request.prompt_token_ids)
        self._check_tokens("stop_token_ids", params.stop_ids)
        self._check_tokens("logit_bias", params.logit_bias or {})
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens("bad_words", request.bad_word_ids)
        self._check_tokens("pooling", () if request.pooling is None else request.pooling.token_ids)
        self._check_head(request)
        if params.prompt_logprobs is not None and any(item.modality == PROMPT_EMBEDS for item in request.features):
            reason = "prompt_logprobs need token ids, which prompt_embeds do not have; leave one of the two out"
            raise InputError(reason, param="prompt_logprobs")
        self._check_adapter(request.adapter)
        self._quarantine.check_items(request.features if request.cross is None else (*request.features, request.cross))
        if request.request_id in self._compiling:
            raise InputError(f"request {request.request_id!r} is already being served")
        if params.structured_outputs is not None:
            compiled = self._grammar_factory.begin(params.structured_outputs, tenant_of(request.salt) or "")
            if not compiled.done():
                self._compiling[request.request_id] = request, compiled
                return
            compiled.result()  # raises the grammar's error
            self.scheduler.add(request)
            self._grammars[request.request_id] = compiled
        else:
            self.scheduler.add(request)

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None:
        """Add tokens and items to a sequence that is held open, and answer again. Item offsets count from the sequence's start.

        Args:
            close: end the sequence with that answer or, without tokens, as soon as it is idle.
            adapter: adapter that computes the whole sequence from now on; None keeps the current one.

        Raises:
            InputError: an unknown sequence or adapter, a sequence that is too long, a token outside the vocabulary, or
                misplaced items.
        """
        self._check_tokens("token_ids", token_ids)
        self._quarantine.check_items(features)
        self._check_adapter(adapter or "")
        self.scheduler.append(request_id, token_ids, features, close, adapter)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Roll a sequence and its KV cache back to the first `num_tokens` tokens. Raise InputError if that cuts an item."""
        self.scheduler.truncate(request_id, num_tokens)

    def pause(self, request_id: str) -> TokenOutput:
        """End the current answer of a sequence that is held open. Return its timings and statistics.

        Raises:
            InputError: an unknown sequence.
        """
        self.scheduler.pause(request_id)
        return self.scheduler.requests[request_id].final_output(TokenOutput(request_id, ()))

    def abort(self, request_id: str) -> TokenOutput | None:
        """Remove a sequence. Return its timings and statistics, or None if it is unknown to the scheduler.

        The worker frees its memory in the next step.
        """
        self._compiling.pop(request_id, None)
        self._grammars.pop(request_id, None)
        request = self.scheduler.requests.get(request_id)
        self.scheduler.abort(request_id)
        return None if request is None else request.final_output(TokenOutput(request_id, ()))

    def close(self) -> None:
        """End the threads and processes that compile grammars. The memory is freed with the object."""
        if self.runner.grammars is not None:
            self.runner.grammars.close()

    def reset_prefix_cache(self) -> bool:
        """Free all cached blocks. Return False if there are sequences, whose blocks remain."""
        self.scheduler.reset_prefix_cache()
        return not self.scheduler.requests

    def sleep(self) -> None:
        """Free weights, caches and buffers until `wake_up`. Do nothing if the engine sleeps already.

        Raises:
            InputError: there are sequences, or the model came from no checkpoint.
        """
        if self._source is None:
            raise InputError("an engine that was made without a checkpoint cannot sleep")
        if self.scheduler.requests or self._compiling:
            raise InputError(
                f"{len(self.scheduler.requests) + len(self._compiling)} sequences are being served; end them, then call sleep()"
            )
        if not self.asleep:
            self.scheduler.reset_caches()
            self._flight, self.asleep = None, True
            self.runner.sleep(self._source.build_on_meta())

    def wake_up(self) -> None:
        """Allocate memory and read the weights again. Do nothing if the engine is awake. On failure it stays asleep.

        Raises:
            CheckpointError: the checkpoint was changed since it was loaded, or cannot be read.
            InputError: there is too little memory.
        """
        if not self.asleep:
            return
        assert self._source is not None
        try:
            self.runner.wake_up(self._source.reload)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the failed attempt
            self.runner.sleep(self.runner.model)
            if not is_out_of_memory(error):
                raise
            reason = "there is too little memory to wake up; make room on the device, then call wake_up() again"
            raise InputError(reason, code="out_of_memory") from None
        self.asleep = False

    def step(self) -> CoreOutputs:
        """Compute one batch and return its outputs. An exception ends the sequences of this step only.

        With async scheduling, a decode step is launched before the tokens of the previous step are on the host. Its results
        for sequences that have ended meanwhile are dropped.
        """
        failed = self._add_compiled() if self._compiling else ()
        flight, self._flight = self._flight, None
        if flight is None or not flight.wanted(self.scheduler):
            flight = self._launch(self.scheduler.schedule())
        if flight is None:
            return CoreOutputs(failed, True, self._publish())
        self._flight = self._launch_after(flight)
        outputs = self._collect(flight)
        for output in outputs:
            if output.finish_reason is not None and output.request_id not in self.scheduler.requests:
                self._grammars.pop(output.request_id, None)
        return CoreOutputs((*failed, *outputs) if failed else outputs, False, self._publish())

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, and current values."""
        return replace(
            self.scheduler.stats,
            waiting=len(self.scheduler.waiting) + len(self._compiling),
            encoder_calls=self._encoder_calls,
            encoder_disk_hits=self._disk_hits,
            quarantined=len(self._quarantine),
        )

    def _publish(self) -> EngineStats:
        """Return the last snapshot of the statistics, or a new one if it is old or a sequence began or ended since."""
        scheduler, now = self.scheduler, time.monotonic()
        counts = len(scheduler.requests), len(scheduler.running), len(scheduler.waiting), len(self._compiling)
        if not any(counts) or counts != self._snapshot_counts or now - self._snapshot_time >= _SNAPSHOT_SECONDS:
            self._snapshot, self._snapshot_time, self._snapshot_counts = self.stats, now, counts
        return self._snapshot

    @property
    def _grammar_factory(self) -> GrammarFactory:
        if self.runner.grammars is None:
            raise InputError("structured_outputs need a tokenizer, and this engine was made without one")
        return self.runner.grammars

    def _add_compiled(self) -> tuple[TokenOutput, ...]:
        """Add requests whose grammar has been compiled to the scheduler. Return an output for each failed compilation."""
        failed = []
        for name, (request, compiled) in [entry for entry in self._compiling.items() if entry[1][1].done()]:
            del self._compiling[name]
            try:
                compiled.result()
                self.scheduler.add(request)
                self._grammars[name] = compiled
            except Exception as error:
                failed.append(TokenOutput(name, (), finish_reason="error", error=error_info(error, "compiling a grammar")))
        return tuple(failed)

    def _launch(self, output: SchedulerOutput | None, after: AsyncStepOutput | None = None) -> _Flight | None:
        """Launch a step. Return None if there is nothing to do."""
        if output is None or (output == replace(_NOTHING, step=output.step) and not self.scheduler.encoder_cache.pending):
            return None
        if output.encode:  # forget tasks whose rows were dropped: they get no result
            pending = {key: task for key, task in self._encode_tasks.items() if key in self.scheduler.encoder_cache.pending}
            self._encode_tasks = pending | {task.hash: task for task in output.encode}
            self.report_encoding(self._encode_tasks)
        sequences = [self.scheduler.requests[task.request_id] for task in output.scheduled]
        epochs = [request.epoch for request in sequences]
        try:
            return _Flight(output, sequences, epochs, self.runner.execute_model(output, after))
        except BaseException as error:
            return _Flight(output, sequences, epochs, error)

    def _launch_after(self, flight: _Flight) -> _Flight | None:
        """Launch the step after this one. Return None if it needs this one's tokens on the host."""
        step = flight.step
        if isinstance(step, BaseException) or step.sampled_token_ids is None:
            return None
        return self._launch(self.scheduler.schedule_ahead(flight.output), step)

    def _collect(self, flight: _Flight) -> tuple[TokenOutput, ...]:
        """Wait for a step and record its results."""
        output = flight.output
        try:
            if isinstance(flight.step, BaseException):
                raise flight.step
            done = flight.step.get_output()
        except BaseException as error:
            if isinstance(error, Exception):
                self.scheduler.requeue_messages(output)
            else:  # an interrupt: sequences go on, but the next step must not use tokens that were never recorded
                after, self._flight = self._flight, None
                if after is not None and isinstance(after.step, BaseException):
                    self._undo(after.output)
                self._undo(output)
                raise
            failure = error_info(error, "a step")
            encoded = tuple(EncodeResult(task.hash, "", failure) for task in output.encode)
            done = StepOutput(tuple(TokenOutput(task.request_id, (), error=failure) for task in output.scheduled), encoded)
        broken = self._record_encoder_results(done)
        # before any result is recorded, because recording changes what is still needed
        still_needed = [flight.is_wanted(self.scheduler, i) for i in range(len(output.scheduled))]
        pairs = zip(still_needed, output.scheduled, done.tokens, strict=True)
        results = [self.scheduler.update_from_output(task, result) for needed, task, result in pairs if needed]
        return (*results, *self._fail_others(broken))

    def _undo(self, output: SchedulerOutput) -> None:
        """Undo an interrupted step: mark its items as not encoded, and send its side messages again."""
        for task in output.encode:
            self._encode_tasks.pop(task.hash, None)
            self.scheduler.encoder_cache.discard(task.hash)
        self.scheduler.requeue_messages(output)

    def _record_encoder_results(self, done: StepOutput) -> list[tuple[EncodeTask, EncodeResult]]:
        """Record encoder results and return the items that failed."""
        broken = []
        for result in done.encoded:
            task = None if result.source == "dropped" else self._encode_tasks.pop(result.hash, None)
            if task is None:  # its requests have ended meanwhile
                self._encoder_calls += result.source != "disk" and result.error is None
                continue
            request = self.scheduler.requests.get(task.request_id)
            if request is not None:
                request.encode_seconds += result.seconds
            self.scheduler.encoder_cache.pending.discard(result.hash)
            if result.error is not None:
                broken.append((task, result))
                self.scheduler.encoder_cache.discard(result.hash)
                if result.item_failed:
                    self._quarantine.add(result.hash)
            elif result.source == "disk":
                self._disk_hits += 1
                if request is not None:
                    request.item_sources[task.index] = "disk"
            else:
                self._encoder_calls += 1
        if done.encoded:
            self.report_encoding(key for key in self._encode_tasks if key in self.scheduler.encoder_cache.pending)
        return broken

    def _fail_others(self, broken: Sequence[tuple[EncodeTask, EncodeResult]]) -> list[TokenOutput]:
        """End the sequences that asked for a failed item and, if the item itself makes the encoder fail, all that hold it."""
        failed = []
        for task, result in broken:
            names = self.scheduler.encoder_cache.users_of(result.hash) if result.item_failed else [task.request_id]
            for request in [self.scheduler.requests[name] for name in names if name in self.scheduler.requests]:
                assert result.error is not None
                error = result.error.for_item(*find_item([item for _, item in request.items()], result.hash))
                failed.append(self.scheduler.fail(TokenOutput(request.request_id, (), error=error)))
        return failed

    def _check_head(self, request: EngineRequest) -> None:
        asked = request.pooling is not None and (request.pooling.classifies, request.pooling.classifies_tokens)
        if asked and any(asked) and not self.info.num_labels:
            raise InputError(
                "this checkpoint has no classification head; use llm.embed, llm.score or PoolingParams(token_ids=...)"
            )
        if asked and asked[0] and self.info.labels_tokens:
            raise InputError('this checkpoint classifies tokens; use encode(..., pooling_task="token_classify")')
        if request.pooling is not None and request.pooling.cross_attention:
            self._check_cross_attention(request, request.pooling.cross_attention)
        if request.pooling is not None and (request.pooling.layer or 0) > self.info.captured_layers:
            limit = f"this model returns those after 1 to {self.info.captured_layers} layers"
            known = limit if self.info.captured_layers else "this model returns none"
            raise InputError(f"layer={request.pooling.layer} asks for hidden states of a layer; {known}", param="layer")
        if not self.info.can_generate and (request.pooling is None or request.pooling.token_ids or request.pooling.candidates):
            raise InputError("this checkpoint has no head (lm_head.weight) and cannot generate or score; use llm.embed")

    def _check_cross_attention(self, request: EngineRequest, heads: Sequence[tuple[int, int]]) -> None:
        layers, count = self.info.cross_attention
        if request.cross is None or not layers:
            reason = "cross_attention needs an encoder-decoder model and a prompt with audio; leave it out"
            raise InputError(reason, param="cross_attention")
        wrong = next(((layer, head) for layer, head in heads if layer >= layers or head >= count), None)
        if wrong is not None:
            known = f"the layers 0 to {layers - 1} with the heads 0 to {count - 1}"
            raise InputError(f"cross_attention holds {wrong}; this decoder has {known}", param="cross_attention")

    def _check_adapter(self, name: str) -> None:
        known = self.info.adapters
        if name and name not in known:
            raise InputError(f"no adapter {name!r}; {hint(name, known)}", param="adapter")

    def _check_tokens(self, param: str, given: Collection[Any]) -> None:
        """Check token ids, or sequences of token ids. An object that several sequences share is checked once."""
        if given is self._checked.get(param):
            return
        vocab, token_ids = self.info.vocab_size, tuple(chain.from_iterable(given)) if param == "bad_words" else given
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab):
            token = next(token for token in token_ids if not 0 <= token < vocab)
            raise InputError(f"{param} holds {token}; the vocabulary has the ids 0 to {vocab - 1}", param=param)
        if param in ("allowed_token_ids", "bad_words"):
            self._checked[param] = given


def _info(scheduler: Scheduler, runner: ModelRunner, source: ModelReloader | None) -> CoreInfo:
    model, limits = runner.model, scheduler.limits
    cross = [spec for spec in model.cache_specs if spec.kind == "cross" and not spec.optional]  # others return no weights
    return CoreInfo(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        row_bytes=runner.store.row_bytes,
        dtype=str(runner.store.dtype).removeprefix("torch."),
        device=str(runner.device),
        adapters=tuple(model.adapters),
        modalities=() if source is None else source.modalities,
        structured_outputs=runner.grammars is not None,
        can_sleep=source is not None,
        can_generate=model.can_generate,
        num_labels=model.num_labels if isinstance(model, SupportsClassification) else 0,
        labels_tokens=getattr(model, "labels_tokens", False),
        cross_attention=(len(cross), cross[0].kv_heads if cross else 0),
        captured_layers=getattr(model, "captured_layers", 0),
        pooling=model.pooling if isinstance(model, SupportsPooling) else "last",
        vector_size=model.vector_size if isinstance(model, SupportsPooling) else model.hidden_size,
        token_size=model.token_size if isinstance(model, SupportsPooling) else model.hidden_size,
    )
