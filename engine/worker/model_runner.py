"""The model runner: encodes items, builds the batch, runs the model and samples, for one step on one device."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import InputError
from ...callers.heap import trim_heap
from ...kernels.dispatch import use_backends
from ...kernels.streams import copy_to_host
from ...mm.buffers import BUFFERS
from ...mm.rules import CAUSAL, PromptAttention
from ...mm.types import find_item
from ...models.interface import Model, SupportsStreams
from ...models.layers.ranks import Ranks, absent_caches
from ..connectors.tensor_store import TensorStore
from ..kv_cache.groups import group_layers, group_of_layer
from ..pooling_requests import LikelyTokens, PoolingRequest, SpokenPrompt, keeps_rows
from ..types import (
    EncodeResult,
    KVLookupResult,
    KVTransfer,
    LoadedAdapter,
    Logprob,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenOutput,
)
from .batch import KVCaches, ModelRows, build_batch, cross_counts
from .cache_tensors import allocate_caches
from .decode_graphs import DecodeGraphs
from .encoder_runner import EncoderRunner, is_finite
from .encoder_store import EncoderStore
from .grammar import GrammarFactory
from .isolate import isolate_failures
from .kv_block_store import KVBlockStore
from .pooling import keep_rows, kept_rows, likely_tokens, pool, spoken_prompt
from .predictor import ComputedPart, Predictor
from .sampler import NOT_FINITE, SampledToken, gather_logprobs, sample_async, verify
from .sequence_state import SequenceState
from .staging import StagingBuffers
from .token_outputs import pooled_output, token_output

if TYPE_CHECKING:
    from ...models.request_adapters import ModelPart
    from .adapter_store import AdapterStore

ScheduledSequence = tuple[SequenceState, ScheduledRequest]
_SampledRows = tuple[SequenceState, range, tuple[int, ...]]  # sequence, its rows of the step that are sampled, its drafts
_Entry = TypeVar("_Entry", bound=tuple[SequenceState, *tuple[Any, ...]])
LOGITS_ROWS = 256  # rows of a prompt whose logits are computed at once
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AsyncStepOutput:
    """A launched step.

    Args:
        get_output: waits for its results. It must be called once.
        request_index: by request, the index of its token in `sampled_token_ids`.
        sampled_token_ids: int64 `[sequences]`, on the device; None if only `get_output` has the tokens.
    """

    get_output: Callable[[], StepOutput]
    request_index: Mapping[str, int] = field(default_factory=dict)
    sampled_token_ids: Tensor | None = None


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a ModelRunner.

    Args:
        grammars: compiles structured outputs; None without a tokenizer.
        invariant: as in KVCaches.
        prompt_attention: as in SchedulerLimits.
        kernels: as in EngineConfig.
        async_scheduling: a step may start before the tokens of the last one are on the host, and items are encoded
            beside steps that do not read them.
        predictor: drafts tokens after each step.
        adapters: those that requests may choose; None if the model takes none.
        encoder_ranks: as in EncoderRunner.
        kv_store: keeps KV blocks outside the caches; None: nothing does.
    """

    grammars: GrammarFactory | None = None
    invariant: bool = False
    prompt_attention: PromptAttention = CAUSAL
    kernels: str = ""
    async_scheduling: bool = False
    predictor: Predictor | None = None
    adapters: AdapterStore | None = None
    encoder_ranks: Ranks | None = None
    kv_store: TensorStore | None = None


class ModelRunner:
    """Runs the prompt and decode rows of all sequences, in one batch per step.

    SchedulerOutput describes the step. The runner keeps the states of sequences, the encoder rows and the KV caches.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        store: EncoderStore,
        options: RunnerOptions = RunnerOptions(),
    ) -> None:
        """Allocate the KV caches. `num_blocks`: number of blocks of each cache group."""
        self.model, self.device, self.store, self.grammars = model, device, store, options.grammars
        groups = group_layers(model.cache_specs)
        self._specs, self._num_blocks = model.cache_specs, num_blocks
        specs = [group.spec for group in groups]
        self.caches = KVCaches(self._allocate(block_size), group_of_layer(groups), specs, block_size, options.invariant)
        self.prompt_attention, self.kernels = options.prompt_attention, options.kernels
        self.sequences: dict[str, SequenceState] = {}
        self.decode_graphs, self.staging = DecodeGraphs(device), StagingBuffers(device)
        self.async_scheduling = options.async_scheduling
        self.encoder_runner = EncoderRunner(store, device, adapters=options.adapters, ranks=options.encoder_ranks)
        self.predictor, self.adapters, self._predict_seconds = options.predictor, options.adapters, 0.0
        absent = absent_caches(model)
        local = [replace(group, layers=tuple(layer for layer in group.layers if layer not in absent)) for group in groups]
        self.kv_blocks = None if options.kv_store is None else KVBlockStore(options.kv_store, local, block_size)

    def sleep(self, empty: Model, keep_sequences: bool = False) -> None:
        """Free weights and caches. `empty`: the model without weights. `keep_sequences`: see `Executor.sleep`."""
        self.model, self.caches = empty, replace(self.caches, tensors=())
        if not keep_sequences:
            self.sequences.clear()
        for sequence in self.sequences.values():
            sequence.begin_again()
        if self.predictor is not None:
            self.predictor.sleep()
        if self.adapters is not None:
            self.adapters.clear()
        self.encoder_runner.clear()
        self.decode_graphs, self.staging = DecodeGraphs(self.device), StagingBuffers(self.device)
        gc.collect()
        _release_free_memory(self.device)

    def wake_up(self, make: Callable[[], Model]) -> None:
        """Allocate the caches, and make the model and what drafts for it again.

        On failure the runner keeps its model without weights; `sleep` frees what the attempt has left.
        """
        tensors = self._allocate(self.caches.block_size)
        model = make()
        if self.predictor is not None:
            self.predictor.wake_up(model)
        self.model, self.caches = model, replace(self.caches, tensors=tensors)
        _release_free_memory(self.device)

    def _allocate(self, block_size: int) -> Sequence[Tensor]:
        return allocate_caches(self._specs, self._num_blocks, block_size, self.device)

    def load_adapter(self, folder: Path, seconds: float, resume: bool) -> LoadedAdapter | None:
        """Read an adapter for requests. Arguments, result and errors: see `AdapterStore.load`."""
        from .adapter_store import layers_of

        layers = layers_of(self.model)
        assert self.adapters is not None
        with use_backends(self.kernels):
            return self.adapters.load(layers, folder, seconds, resume)

    @torch.inference_mode()
    def transfer(self, transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        """Copy KV blocks. See `Executor`."""
        assert self.kv_blocks is not None
        return self.kv_blocks.transfer(self.caches.tensors, transfer)

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput, previous: AsyncStepOutput | None = None) -> AsyncStepOutput:
        """Start a step.

        Args:
            previous: the previous step, if all input tokens of this step were sampled there and may still be on the device.
        """
        with use_backends(self.kernels), self.staging:
            return self._execute_model(output, previous)

    def _execute_model(self, output: SchedulerOutput, previous: AsyncStepOutput | None) -> AsyncStepOutput:
        self._update_states(output)
        self._predict_seconds = 0.0
        items = [self.sequences[task.request_id].item(task.index) for task in output.encode]
        encoded = () if self.async_scheduling else self.encoder_runner.encode(self.model, items)
        scheduled, results = self._split_failed(output.scheduled, encoded)
        hidden, starts = self._forward(scheduled, previous) if scheduled else (None, ())
        if self.async_scheduling:  # after the forward was launched, which reads none of these items: both run at once
            self.encoder_runner.submit(self.model, items)
        if hidden is not None:
            if self.async_scheduling and self.predictor is None and all(_can_sample_async(*entry) for entry in scheduled):
                return self._sample_async(scheduled, hidden, starts)
            results.update((result.request_id, result) for result in self._sample_and_pool(scheduled, hidden, starts))
        tokens = tuple(results[task.request_id] for task in output.scheduled)
        seconds = self._predict_seconds
        return AsyncStepOutput(lambda: StepOutput(tokens, encoded or self._poll_encoder(wait=not tokens), seconds))

    def _end_stream(self, is_held: bool, stream: int | None) -> None:
        """Free the state of a stream with the end of one of its requests. `is_held`: this request was held open."""
        model = self.model
        if stream is not None and isinstance(model, SupportsStreams) and (is_held or not model.keeps_open_windows):
            model.free_stream(stream)

    def _update_states(self, output: SchedulerOutput) -> None:
        for request_id in output.finished:
            sequence = self.sequences.pop(request_id, None)
            if sequence is not None and sequence.features:
                self._end_stream(sequence.message.hold_open, sequence.features[0].stream)
            if self.predictor is not None:
                self.predictor.free(request_id)
        self.encoder_runner.discard(output.free_encoder)
        if output.zero_blocks:
            for tensor, group_of_tensor in zip(self.caches.tensors, self.caches.group_of, strict=True):
                tensor[:, [block for group, block in output.zero_blocks if group == group_of_tensor]] = 0
        for request in output.new_requests:
            self.sequences[request.request_id] = SequenceState(
                request, self.model.rope_axes, self.prompt_attention, self.grammars
            )
        for change in output.updates:
            self.sequences[change.request_id].update(change)
        for task in output.scheduled:
            if task.sample:  # an interrupted step may have left tokens that were never returned
                sequence, num_known = self.sequences[task.request_id], task.num_computed + task.num_tokens
                if len(sequence.token_ids) > num_known - len(task.draft_token_ids):
                    sequence.forget(num_known - len(task.draft_token_ids))

    def _split_failed(
        self, tasks: Sequence[ScheduledRequest], encoded: Sequence[EncodeResult]
    ) -> tuple[list[ScheduledSequence], dict[str, TokenOutput]]:
        """Return the sequences that can be computed, and errors for those with an item that could not be encoded."""
        scheduled = [(self.sequences[task.request_id], task) for task in tasks]
        errors = {result.hash: result.error for result in encoded if result.error is not None}
        if not errors:
            return scheduled, {}
        good: list[ScheduledSequence] = []
        results: dict[str, TokenOutput] = {}
        for sequence, task in scheduled:
            failed = next((item.hash for item in sequence.items_in_step(task) if item.hash in errors), None)
            if failed is None:
                good.append((sequence, task))
            else:
                items = [*sequence.message.cross, *sequence.features]
                error = errors[failed].for_item(*find_item(items, failed))
                results[task.request_id] = TokenOutput(task.request_id, (), error=error)
        return good, results

    @torch.inference_mode()
    def _poll_encoder(self, wait: bool) -> tuple[EncodeResult, ...]:
        """Return results of items that are encoded beside steps. `wait`: wait briefly for the first one."""
        with use_backends(self.kernels):
            return self.encoder_runner.poll(self.model, wait)

    def _forward(self, scheduled: list[ScheduledSequence], previous: AsyncStepOutput | None) -> tuple[Tensor, Sequence[int]]:
        """Run the model. Return hidden states `[rows, hidden]`, and the first row of each sequence."""
        model = self.model
        rows = ModelRows(model.routes_by_modality, model.adapters, model.hidden_size)
        batch = build_batch(scheduled, self.store.rows, self.caches, self.staging, rows)
        if previous is not None:
            assert previous.sampled_token_ids is not None, "the previous step has no tokens on the device"
            index = self.staging(np.array([previous.request_index[task.request_id] for _, task in scheduled]))
            batch = replace(batch, input_ids=previous.sampled_token_ids.index_select(0, index))
        if self.predictor is not None:
            batch = self.predictor.watch(batch)
        starts = [0, *accumulate(task.num_tokens for _, task in scheduled)]
        if self.adapters is not None:
            counts = [task.num_tokens for _, task in scheduled]
            rows_of_part: dict[ModelPart, list[int]] = {"decoder": counts, "experts": counts, "cross": cross_counts(scheduled)}
            names = [sequence.adapter for sequence, _ in scheduled]
            groups = {part: self.adapters.groups(part, names, own, self.staging) for part, own in rows_of_part.items()}
            if any(groups.values()):
                from .adapter_store import layers_of

                layers = layers_of(model)
                recorded = not (groups["experts"] or groups["cross"]) and self.adapters.are_recorded("decoder", names)
                with ExitStack() as applied:
                    for part, own in rows_of_part.items():
                        applied.enter_context(layers.applied(part, groups[part], sum(own)))
                    table = layers.active["decoder"].products.address
                    return (self.decode_graphs(model.forward, batch, table) if recorded else model.forward(batch)), starts
        return self.decode_graphs(model.forward, batch), starts

    @contextmanager
    def _adapted_head(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> Iterator[None]:
        """Apply the adapters of sequences to the head inside the context. `counts`: rows of each one's logits or classes.

        The adapter of a single sequence applies to any number of rows.
        """
        names = [sequence.adapter for sequence in sequences]
        groups = [] if self.adapters is None else self.adapters.groups("head", names, counts, self.staging)
        if not groups:
            yield
            return
        from .adapter_store import layers_of

        num_rows = sum(counts) if len(sequences) > 1 else None
        with layers_of(self.model).applied("head", groups, num_rows):
            yield

    def _by_adapter(self, entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
        """Yield the entries of each adapter of requests, whose first elements are sequences, with the head adapted."""
        if self.adapters is None:
            yield from [list(entries)] if entries else []
            return
        parts = dict[str, list[_Entry]]()
        for entry in entries:
            parts.setdefault(entry[0].adapter, []).append(entry)
        for part in parts.values():
            with self._adapted_head([part[0][0]], [1]):
                yield part

    def _sample_async(self, scheduled: Sequence[ScheduledSequence], hidden: Tensor, starts: Sequence[int]) -> AsyncStepOutput:
        """Sample a token for every sequence on the device; `get_output` reads them later."""
        with self._adapted_head([sequence for sequence, _ in scheduled], [1] * len(scheduled)):
            logits = self.model.compute_logits(self._select_rows(hidden, [stop - 1 for stop in starts[1:]]))
        first, task = scheduled[0]
        ahead = task.num_computed + task.num_tokens - len(first.token_ids)
        sampled = sample_async(logits, [sequence.sampling for sequence, _ in scheduled], self.staging, ahead)
        read_finite = copy_to_host(is_finite(hidden))

        def get_output() -> StepOutput:
            row_is_finite, results = read_finite(), []
            for (sequence, task), result, start, stop in zip(scheduled, sampled.get(), starts, starts[1:], strict=False):
                if not all(row_is_finite[start:stop]):
                    results.append(TokenOutput(task.request_id, (), error=NOT_FINITE))
                elif isinstance(result, Exception):
                    results.append(token_output(sequence, result))
                else:
                    sequence.token_ids.append(result.token)
                    results.append(token_output(sequence, [result]))
            return StepOutput(tuple(results), self._poll_encoder(wait=False))

        index = {task.request_id: i for i, (_, task) in enumerate(scheduled)}
        return AsyncStepOutput(get_output, index, sampled.sampled_token_ids)

    def _sample_and_pool(self, scheduled: list[ScheduledSequence], hidden: Tensor, starts: Sequence[int]) -> list[TokenOutput]:
        """Return each sequence's token, pooled output or prompt log probabilities."""
        # hidden states need no check in a step that samples every row, because the sampler checks the logits
        decode = all(task.sample and task.num_tokens == 1 and sequence.message.pooling is None for sequence, task in scheduled)
        row_is_finite = [True] * starts[-1] if decode else is_finite(hidden).tolist()
        finite = [all(row_is_finite[start:stop]) for start, stop in pairwise(starts)]
        kept = [
            (sequence, hidden[start:stop], task.num_computed)
            for (sequence, task), start, stop, good in zip(scheduled, starts, starts[1:], finite, strict=False)
            if good and sequence.message.pooling is not None and keeps_rows(sequence.message.pooling)
        ]
        for part in self._by_adapter(kept):
            keep_rows(part, self.model)
        sampled = [
            (sequence, range(stop - 1 - len(task.draft_token_ids), stop), task.draft_token_ids)
            for (sequence, task), stop, good in zip(scheduled, starts[1:], finite, strict=True)
            if task.sample and good
        ]
        last_rows = [(sequence, rows[-1]) for sequence, rows, _ in sampled]
        prompt_logprobs = [
            self._prompt_logprobs(sequence, task, hidden, start) if good else None
            for (sequence, task), start, good in zip(scheduled, starts, finite, strict=False)
        ]
        pooled = [row for row in last_rows if row[0].message.pooling is not None]
        others = LikelyTokens | SpokenPrompt
        results = self._pool([row for row in pooled if not isinstance(row[0].message.pooling, others)], hidden)
        results |= self._find_candidates([row for row in pooled if isinstance(row[0].message.pooling, LikelyTokens)], hidden)
        results |= self._speak([sequence for sequence, _ in pooled if isinstance(sequence.message.pooling, SpokenPrompt)])
        results |= self._sample([entry for entry in sampled if entry[0].message.pooling is None], hidden)
        outputs = []
        for (_, task), logprobs, good in zip(scheduled, prompt_logprobs, finite, strict=True):
            output = results.get(task.request_id) or TokenOutput(task.request_id, (), error=None if good else NOT_FINITE)
            outputs.append(output if logprobs is None else replace(output, prompt_logprobs=logprobs))
        return outputs if self.predictor is None else self._predict(self.predictor, scheduled, outputs, hidden, starts)

    def _predict(
        self,
        predictor: Predictor,
        scheduled: Sequence[ScheduledSequence],
        outputs: list[TokenOutput],
        hidden: Tensor,
        starts: Sequence[int],
    ) -> list[TokenOutput]:
        """Add what the predictor drafts; a failure is logged, and it stops for these sequences."""
        states = predictor.states(hidden).tensor_split(starts[1:-1])
        indices, parts = list[int](), list[ComputedPart]()
        for index, ((sequence, task), output, rows) in enumerate(zip(scheduled, outputs, states, strict=True)):
            if not task.predict:
                predictor.free(sequence.request_id)
            elif sequence.predicts and output.error is None and sequence.message.pooling is None:
                indices.append(index)
                parts.append(ComputedPart(sequence, task, rows))
        started = time.perf_counter()
        try:
            predicted = predictor.predict(self.model, parts) if parts else []
        except Exception:
            _log.exception("drafting failed; it stops for the sequences of this step")
            for part in parts:
                predictor.free(part.sequence.request_id)
                part.sequence.predicts = False
            return outputs
        self._predict_seconds = time.perf_counter() - started
        for index, tokens in zip(indices, predicted, strict=True):
            outputs[index] = replace(outputs[index], predicted=tokens)
        return outputs

    def _sample(self, sampled: Sequence[_SampledRows], hidden: Tensor) -> dict[str, TokenOutput]:
        """Sample the tokens of each sequence. A sequence that cannot be sampled fails alone."""

        def attempt(part: Sequence[_SampledRows]) -> list[list[SampledToken] | Exception]:
            selected = self._select_rows(hidden, [row for _, rows, _ in part for row in rows])
            with self._adapted_head([sequence for sequence, *_ in part], [len(rows) for _, rows, _ in part]):
                logits = self.model.compute_logits(selected)
            return verify(logits, [sequence.sampling for sequence, _, _ in part], [drafts for *_, drafts in part], self.staging)

        results = zip(sampled, isolate_failures(sampled, attempt), strict=True)
        return {sequence.request_id: token_output(sequence, tokens) for (sequence, *_), tokens in results}

    def _pool(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Pool the last rows, or the kept ones, of sequences that ask for it instead of an answer."""
        results = dict[str, TokenOutput]()
        for part in self._by_adapter(last_rows):
            results |= self._pool_alike(part, hidden)
        return results

    def _pool_alike(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Pool sequences of one adapter; see `_pool`."""
        results, names, rows, poolings = dict[str, TokenOutput](), list[str](), list[Tensor](), list[PoolingRequest]()
        for sequence, row in last_rows:
            pooling = sequence.message.pooling
            if sequence.cross_weights is not None:
                results[sequence.request_id] = pooled_output(sequence.request_id, sequence.cross_weights)
            elif pooling is not None:
                names.append(sequence.request_id)
                rows.append(kept_rows(sequence, hidden[row : row + 1], self.model))
                poolings.append(pooling)
        vectors = pool(rows, poolings, self.model)
        return results | {name: pooled_output(name, vector) for name, vector in zip(names, vectors, strict=True)}

    def _speak(self, sequences: Sequence[SequenceState]) -> dict[str, TokenOutput]:
        """Speak prompts one by one. One that fails fails alone."""
        results = dict[str, TokenOutput]()
        for sequence in sequences:
            name = sequence.request_id
            try:
                results[name] = pooled_output(name, spoken_prompt(sequence, self.model, self.device))
            except InputError as error:
                results[name] = TokenOutput(name, (), error=error.info)
            except Exception as error:
                results[name] = pooled_output(name, error)
        return results

    def _find_candidates(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Return the likeliest next tokens of each sequence. A sequence whose logits processors fail fails alone."""

        def attempt(part: Sequence[tuple[SequenceState, int]]) -> list[Tensor | Exception]:
            return likely_tokens(hidden[[row for _, row in part]], [sequence for sequence, _ in part], self.model)

        results = dict[str, TokenOutput]()
        for part in self._by_adapter(last_rows):
            for (sequence, _), candidates in zip(part, isolate_failures(part, attempt), strict=True):
                results[sequence.request_id] = pooled_output(sequence.request_id, candidates)
        return results

    def _select_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Return `rows` of `hidden`. They must be distinct and in order."""
        return hidden if len(rows) == hidden.shape[0] else hidden[self.staging(np.array(rows))]

    def _prompt_logprobs(
        self, sequence: SequenceState, task: ScheduledRequest, hidden: Tensor, start: int
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Extend the prompt's log probabilities by this chunk. Returns all of them once the prompt is complete, else None.

        After a rollback into the prompt, the log probabilities of the remaining tokens are kept.
        """
        count, logprobs = sequence.message.params.prompt_logprobs, sequence.prompt_logprobs
        if count is None or logprobs is None:
            return None
        prompt = sequence.message.prompt_token_ids[: sequence.prompt_length]
        del logprobs[len(prompt) :]
        if not logprobs:
            logprobs.append(None)  # nothing predicts the first token
        stop = min(task.num_computed + task.num_tokens, len(prompt) - 1)
        for first in range(len(logprobs) - 1, stop, LOGITS_ROWS):
            last = min(first + LOGITS_ROWS, stop)
            base = start - task.num_computed
            with self._adapted_head([sequence], [last - first]):
                logits = self.model.compute_logits(hidden[base + first : base + last])
            logprobs.extend(gather_logprobs(logits, prompt[first + 1 : last + 1], count))
        if len(logprobs) < len(prompt):
            return None
        sequence.prompt_logprobs = None
        return tuple(logprobs)


def _release_free_memory(device: torch.device) -> None:
    """Return unused memory from the allocators to the device and the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    BUFFERS.clear()
    trim_heap()


def _can_sample_async(sequence: SequenceState, task: ScheduledRequest) -> bool:
    """True if the step does nothing for this sequence but sample a token from unchanged logits."""
    more = sequence.message.pooling is not None or sequence.message.params.prompt_logprobs is not None
    return task.num_sampled == 1 and not sequence.sampling.changes_logits and not more
