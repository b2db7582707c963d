"""The engine's core. It queues sequences and computes them step by step.

Callers use its verbs only: add, append, truncate, pause, abort, step, sleep and wake_up, see `client.CoreClient`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from ...callers.errors import InputError, hint
from ...mm.embeddings import PROMPT_EMBEDS
from ...mm.tenants import tenant_of
from ...mm.types import MultiModalFeature
from ..core_info import CoreInfo, task_without_head
from ..errors import error_info, error_text
from ..executor import Executor
from ..pooling_requests import CrossAttentionWeights, LayerStates, LikelyTokens, PromptClasses, TokenClasses, TokenLogits
from ..scheduler.scheduler import Scheduler
from ..stats import EngineStats
from ..types import (
    CoreOutputs,
    EngineRequest,
    GrammarTask,
    LoadedAdapter,
    SchedulerOutput,
    StepHandle,
    TokenOutput,
    WorkerUpdate,
)
from .client import ASLEEP

_log = logging.getLogger(__name__)
_SNAPSHOT_SECONDS = 0.05  # maximum age of a snapshot of the statistics while no sequence begins or ends


@dataclass(frozen=True, eq=False)
class _Flight:
    """A step whose results are not recorded yet; `handle` is an error if it could not start."""

    output: SchedulerOutput
    handle: StepHandle | BaseException


class EngineCore:
    """Scheduler and executor behind the verbs of `CoreClient`, in this process.

    Arguments and results are plain data that `codec` can encode.
    """

    restart = None  # the core lives as long as its process

    def __init__(self, scheduler: Scheduler, executor: Executor, info: CoreInfo) -> None:
        """Join them. `info`: see `Executor.describe`."""
        self.scheduler, self.executor, self.info = scheduler, executor, info
        self.asleep = False
        # called with the hashes of the items being encoded, whenever these change
        self.report_encoding: Callable[[Iterable[str]], object] = lambda keys: None
        self._flight: _Flight | None = None
        self._compiling: dict[str, EngineRequest] = {}  # requests whose grammar is being compiled
        self._compiled: set[str] = set()  # requests whose grammar the executor keeps
        self._refused: dict[str, Exception] = {}  # requests that the next step reports, because their grammar or adapter failed
        self._adapters: dict[str, tuple[str, int]] = {}  # identity -> folder, and how often it was loaded
        self._missing: set[str] = set()  # those of them that `reload_adapters` could not read
        self._checked: dict[str, Collection[Any]] = {}  # the token ids last checked, by parameter
        self._snapshot, self._snapshot_time, self._snapshot_counts = EngineStats(), 0.0, (0, 0, 0, 0)

    def bind_thread(self, num_threads: int) -> None:
        """Prepare the calling thread, which will call `step`. `num_threads`: number of torch's threads."""
        self.executor.bind_thread(num_threads)

    def watch(self, on_end: Callable[[], object]) -> None:
        """Do nothing: the core lives in this process."""

    def check_alive(self) -> None:
        """Do nothing: the core lives in this process."""

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence. If its grammar has to be compiled, this runs in another thread and the sequence waits for it.

        Raises:
            InputError: an empty or too long prompt, a token outside the vocabulary, misplaced items, an item in quarantine,
                an invalid grammar, an unknown adapter, or a sleeping engine.
        """
        if self.asleep:
            raise InputError(ASLEEP, code="engine_asleep")
        params, pooling = request.params, request.pooling
        self._check_tokens("prompt_token_ids", request.prompt_token_ids)
        self._check_tokens("stop_token_ids", params.stop_ids)
        self._check_tokens("logit_bias", params.logit_bias or {})
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens("bad_words", request.bad_word_ids)
        if params.draft_text is not None:  # other drafts are hints; their unknown tokens are left out
            self._check_tokens("draft_text", request.draft_token_ids)
        self._check_tokens("pooling", pooling.token_ids if isinstance(pooling, TokenLogits) else ())
        self._check_head(request)
        if params.prompt_logprobs is not None and any(item.modality == PROMPT_EMBEDS for item in request.features):
            reason = "<<param>> need token ids, which prompt_embeds do not have; leave one of the two out"
            raise InputError(reason, param="prompt_logprobs")
        self._check_adapter(request.adapter)
        self.scheduler.sequences.check_items((*request.features, *request.cross))
        if request.request_id in self._compiling or request.request_id in self.scheduler.sequences:
            raise InputError(f"request {request.request_id!r} is already being served")
        if params.structured_outputs is None:
            self.scheduler.sequences.add(request)
        else:
            self._compile(request, GrammarTask(request.request_id, params.structured_outputs, tenant_of(request.salt) or ""))

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
        self.scheduler.sequences.check_items(features)
        self._check_adapter(adapter or "")
        self.scheduler.sequences.append(request_id, token_ids, features, close, adapter)
        if close and request_id not in self.scheduler.sequences:
            self._release_grammar(request_id)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Roll a sequence and its KV cache back to the first `num_tokens` tokens. Raise InputError if that cuts an item."""
        self.scheduler.sequences.truncate(request_id, num_tokens)

    def pause(self, request_id: str) -> TokenOutput:
        """End the current answer of a sequence that is held open. Return its timings and statistics.

        Raises:
            InputError: an unknown sequence.
        """
        return self.scheduler.sequences.pause(request_id)

    def abort(self, request_id: str) -> TokenOutput | None:
        """Remove a sequence. Return its timings and statistics, or None if it is unknown to the scheduler.

        The worker frees its memory in the next step.
        """
        if self._compiling.pop(request_id, None) is not None:
            self._compiled.add(request_id)
        self._release_grammar(request_id)
        return self.scheduler.sequences.abort(request_id)

    def register(self, name: str, path: str) -> None:
        """Register a logits processor from its path, "module:name". Raise InputError if it cannot be imported."""
        self.executor.register(name, path)

    def close(self) -> None:
        """End the executor's threads and processes. The memory is freed with the object."""
        self.executor.close()

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None:
        """Read an adapter that requests may name by its identity. Each call that returns one needs one of `unload_adapter`.

        Args:
            seconds: read for about so long, and return None if that was not enough. Steps can be computed meanwhile.
            resume: go on with the folder of the last call.

        Raises:
            ConfigError, CheckpointError: the adapter is not supported, or does not fit the model.
            InputError: there is too little room, the engine sleeps, or it takes no adapters.
        """
        if self.asleep:
            raise InputError(ASLEEP, code="engine_asleep")
        loaded = self.executor.load_adapter(folder, seconds, resume)
        if loaded is None:
            return None
        self._adapters[loaded.identity] = folder, self._adapters.get(loaded.identity, ("", 0))[1] + 1
        self._missing.discard(loaded.identity)
        return loaded

    def cancel_loading(self) -> None:
        """Free what `load_adapter` has read so far. Its caller will not resume it."""
        self.executor.cancel_loading()

    def unload_adapter(self, identity: str) -> None:
        """Free an adapter after its last `unload_adapter`. No sequence may use it. Unknown ones are ignored."""
        folder, count = self._adapters.pop(identity, ("", 0))
        if count > 1:
            self._adapters[identity] = folder, count - 1
        elif count:
            self._missing.discard(identity)
            self.executor.unload_adapter(identity)

    def reload_adapters(self, adapters: Mapping[str, tuple[str, int]]) -> None:
        """Read adapters again. Requests that name one whose files cannot be read or have changed are refused.

        Args:
            adapters: identity -> folder, and how often it was loaded, which is how often it will be unloaded.
        """
        self._adapters, self._missing = dict(adapters), set(adapters)
        for folder, _ in adapters.values():
            try:
                loaded = self.executor.load_adapter(folder)
            except Exception as error:
                _log.warning("the adapter in %s cannot be read again: %s", folder, error_text(error))
                continue
            assert loaded is not None
            if loaded.identity not in adapters:
                self.executor.unload_adapter(loaded.identity)
            self._missing.discard(loaded.identity)

    def reset_prefix_cache(self) -> bool:
        """Free all cached blocks. Return False if there are sequences, whose blocks remain."""
        self.scheduler.reset_prefix_cache()
        return not self.scheduler.sequences

    def restart_answer(self, request_id: str) -> int:
        """Remove the tokens of the answer that a sequence is generating. Return how many these were; 0 for an unknown one."""
        return self.scheduler.sequences.restart_answer(request_id)

    def sleep(self, keep_sequences: bool = False) -> None:
        """Free weights, caches and buffers until `wake_up`. Do nothing if the engine sleeps already.

        Args:
            keep_sequences: sequences wait, and then compute all their tokens again, those of their answers included.

        Raises:
            InputError: there are sequences that are not kept, or the model came from no checkpoint.
        """
        if not self.info.can_sleep:
            raise InputError("an engine that was made without a checkpoint cannot sleep")
        live = len(self.scheduler.sequences) + len(self._compiling)
        if live and not keep_sequences:
            raise InputError(f"{live} sequences are being served; end them, then call sleep()")
        if not self.asleep:
            flight, self._flight, self.asleep = self._flight, None, True
            if flight is not None and isinstance(flight.handle, BaseException):
                self.scheduler.undo(flight.output)
            self.scheduler.reset_caches()
            self.executor.sleep(keep_sequences)

    def wake_up(self) -> None:
        """Allocate memory and read the weights again. Do nothing if the engine is awake. On failure it stays asleep.

        Raises:
            CheckpointError: the checkpoint was changed since it was loaded, or cannot be read.
            InputError: there is too little memory.
        """
        if self.asleep:
            self.executor.wake_up()
            self.asleep = False
            self.reload_adapters(self._adapters)
            self._refuse_without_adapter()

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Let the next `wake_up` take these weights in place of the checkpoint's. Nothing changes if they do not fit.

        Raises:
            CheckpointError, InputError: as `ModelSource.stage_weights`.
        """
        if not self.info.can_sleep:
            raise InputError("an engine that was made without a checkpoint takes no weights", code="unsupported")
        self.executor.stage_weights(weights)

    def step(self) -> CoreOutputs:
        """Compute one batch and return its outputs. An exception ends the sequences of this step only.

        With async scheduling, a decode step is launched before the tokens of the previous step are on the host. Its results
        for sequences that have ended meanwhile are dropped.
        """
        if self._compiling:
            self._add_compiled(WorkerUpdate())
        refused, self._refused = self._refused, {}
        failed = [_failure(name, error) for name, error in refused.items()]
        self._load_blocks()
        flight, self._flight = self._flight, None
        if flight is None or not self._is_wanted(flight):
            flight = self._launch(self.scheduler.schedule())
        if flight is None:
            return CoreOutputs(tuple(failed), True, self._publish())
        self._flight = self._launch_after(flight)
        outputs = self._collect(flight)
        for output in outputs:
            if output.finish_reason is not None and output.request_id not in self.scheduler.sequences:
                self._release_grammar(output.request_id)
        return CoreOutputs((*failed, *outputs), False, self._publish())

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, and current values."""
        stats = self.scheduler.stats
        return replace(stats, waiting=stats.waiting + len(self._compiling), transfers=self.executor.transfer_stats())

    def _publish(self) -> EngineStats:
        """Return the last snapshot of the statistics, or a new one if it is old or a sequence began or ended since."""
        now, counts = time.monotonic(), (*self.scheduler.counts, len(self._compiling))
        if not any(counts) or counts != self._snapshot_counts or now - self._snapshot_time >= _SNAPSHOT_SECONDS:
            self._snapshot, self._snapshot_time, self._snapshot_counts = self.stats, now, counts
        return self._snapshot

    def _compile(self, request: EngineRequest, task: GrammarTask) -> None:
        """Begin to compile the grammar of a request. Add the request, or raise its error, if that ends at once."""
        if not self.info.structured_outputs:
            raise InputError("structured_outputs need a tokenizer, and this engine was made without one", code="unsupported")
        self._compiling[request.request_id] = request
        self._add_compiled(WorkerUpdate(compile=(task,)))
        error = self._refused.pop(request.request_id, None)
        if error is not None:
            raise error

    def _add_compiled(self, update: WorkerUpdate) -> None:
        """Add requests whose grammar has been compiled to the scheduler."""
        for result in self.executor.update(update):
            name, request = result.request_id, self._compiling.pop(result.request_id, None)
            if request is None:
                continue
            self._compiled.add(name)
            try:
                if result.error is not None:
                    raise result.error.exception()
                self.scheduler.sequences.add(request)
            except Exception as error:
                self._refused[name] = error
                self._release_grammar(name)

    def _release_grammar(self, name: str) -> None:
        if name in self._compiled:
            self._compiled.discard(name)
            self._add_compiled(WorkerUpdate(release=(name,)))  # it may report other grammars, each once

    def _is_wanted(self, flight: _Flight) -> bool:
        """True if any result is still needed, or if the step could not start and its messages must be sent again."""
        return isinstance(flight.handle, BaseException) or self.scheduler.is_wanted(flight.output)

    def _launch(self, output: SchedulerOutput | None) -> _Flight | None:
        """Start a step. Return None if there is nothing to do."""
        if output is None:
            return None
        if output.encode:
            self.report_encoding(self.scheduler.encoding)
        try:
            return _Flight(output, self.executor.execute(output))
        except BaseException as error:
            return _Flight(output, error)

    def _launch_after(self, flight: _Flight) -> _Flight | None:
        """Start the step after this one. Return None if it needs this one's tokens on the host."""
        if isinstance(flight.handle, BaseException) or not flight.handle.can_follow:
            return None
        return self._launch(self.scheduler.schedule_ahead(flight.output))

    def _collect(self, flight: _Flight) -> tuple[TokenOutput, ...]:
        """Wait for a step and record its results."""
        output = flight.output
        try:
            if isinstance(flight.handle, BaseException):
                raise flight.handle
            done = self.executor.poll(flight.handle)
        except Exception as error:
            outputs = self.scheduler.fail_step(output, error_info(error, "a step"))
            has_encoded = bool(output.encode)
        except BaseException:  # an interrupt: sequences go on, but the next step must not use tokens that were never recorded
            after, self._flight = self._flight, None
            if after is not None and isinstance(after.handle, BaseException):
                self.scheduler.undo(after.output)
            self.scheduler.undo(output)
            raise
        else:
            outputs = self.scheduler.update_from_output(output, done)
            self._save_blocks()
            has_encoded = bool(done.encoded)
        if has_encoded:
            self.report_encoding(self.scheduler.encoding)
        return outputs

    def _load_blocks(self) -> None:
        """Ask the connectors for blocks of waiting sequences, and place those that have arrived in the KV cache."""
        transfers = self.scheduler.kv_transfers
        message = None if transfers is None or self.asleep else transfers.begin()
        if transfers is None or message is None:
            return
        try:
            found = self.executor.transfer(message)
        except Exception:
            _log.exception("KV blocks cannot be looked up; they are computed")
            transfers.give_up()
            return
        placed = transfers.place(found)
        if placed is None:
            return
        try:
            self.executor.transfer(placed)
        except Exception:
            _log.exception("KV blocks cannot be placed; they are computed")
            transfers.forget(placed)

    def _save_blocks(self) -> None:
        """Save the blocks that the last step has completed."""
        message = None if self.scheduler.kv_transfers is None else self.scheduler.kv_transfers.take_computed()
        if message is None:
            return
        try:
            self.executor.transfer(message)
        except Exception:
            _log.exception("KV blocks cannot be saved")

    def _check_head(self, request: EngineRequest) -> None:
        pooling = request.pooling
        if isinstance(pooling, PromptClasses | TokenClasses) and not self.info.num_labels:
            raise InputError("this checkpoint has no classification head; <<use_pooling>>", code="unsupported")
        if isinstance(pooling, PromptClasses) and self.info.labels_tokens:
            raise InputError("this checkpoint classifies tokens; <<use_token_classify>>", code="unsupported")
        if isinstance(pooling, CrossAttentionWeights):
            self._check_cross_attention(request, pooling.heads)
        if isinstance(pooling, LayerStates) and pooling.layer > self.info.captured_layers:
            limit = f"this model returns those after 1 to {self.info.captured_layers} layers"
            limits = limit if self.info.captured_layers else "this model returns none"
            raise InputError(
                f"<<param=>>{pooling.layer} asks for hidden states of a layer; {limits}",
                code="unsupported",
                param="layer",
            )
        if not self.info.can_generate and isinstance(pooling, TokenLogits | LikelyTokens | None):
            task = task_without_head(self.info)
            raise InputError(f"this checkpoint has no head (lm_head.weight) and cannot generate: {task}", code="unsupported")

    def _check_cross_attention(self, request: EngineRequest, heads: Sequence[tuple[int, int]]) -> None:
        layers, count = self.info.cross_attention
        if not request.cross or not layers:
            reason = "<<param>> needs an encoder-decoder model and a prompt with audio; leave it out"
            raise InputError(reason, param="cross_attention")
        wrong = next(((layer, head) for layer, head in heads if layer >= layers or head >= count), None)
        if wrong is not None:
            limits = f"the layers 0 to {layers - 1} with the heads 0 to {count - 1}"
            raise InputError(f"<<param>> holds {wrong}; this decoder has {limits}", code="unsupported", param="cross_attention")

    def _refuse_without_adapter(self) -> None:
        """End requests whose adapter could not be read again. The next step reports them."""
        adapters = {name: request.adapter for name, request in self.scheduler.requests.items()}
        adapters |= {name: request.adapter for name, request in self._compiling.items()}
        for name, adapter in adapters.items():
            if adapter in self._missing:
                self.abort(name)
                self._refused[name] = _no_adapter()

    def _check_adapter(self, name: str) -> None:
        adapters = self.info.adapters
        if name.startswith("lora:") and (name not in self._adapters or name in self._missing):
            raise _no_adapter()
        if name and name not in adapters and name not in self._adapters:
            raise InputError(f"no adapter {name!r}; {hint(name, adapters)}", code="unknown_name", value=name, param="adapter")

    def _check_tokens(self, param: str, values: Collection[Any]) -> None:
        """Check token ids, or sequences of token ids. An object that several sequences share is checked once."""
        if values is self._checked.get(param):
            return
        vocab, token_ids = self.info.vocab_size, tuple(chain.from_iterable(values)) if param == "bad_words" else values
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab):
            token = next(token for token in token_ids if not 0 <= token < vocab)
            raise InputError(f"<<param>> holds {token}; the vocabulary has the ids 0 to {vocab - 1}", param=param)
        if param in ("allowed_token_ids", "bad_words"):
            self._checked[param] = values


def _no_adapter() -> InputError:
    reason = "the adapter of this request is no longer loaded, or its files have changed; load it again"
    return InputError(reason, code="unknown_name", param="adapter")


def _failure(name: str, error: Exception) -> TokenOutput:
    """Return the output of a request whose grammar or adapter failed."""
    return TokenOutput(name, (), finish_reason="error", error=error_info(error, "compiling a grammar"))
