"""The model runner: encodes items, builds the batch, runs the model and samples, for one step on one device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ...kernels.dispatch import use_backends
from ...kernels.streams import copy_to_host
from ...mm.errors import ErrorInfo, InputError, is_out_of_memory
from ...mm.heap import trim_heap
from ...mm.types import find_item
from ...models.interface import Model, SupportsStreams
from ..errors import error_text
from ..kv_cache.groups import group_layers, group_of_layer
from ..pooling_params import PoolingParams
from ..types import EncodeResult, Logprob, ScheduledRequest, SchedulerOutput, StepOutput, TokenOutput
from .batch import KVCaches, ScheduledSequence, build_batch
from .cache_tensors import allocate_caches
from .decode_graphs import DecodeGraphs
from .encoder_runner import EncoderRunner, is_finite
from .encoder_store import EncoderStore
from .grammar import GrammarFactory
from .isolate import isolate_failures
from .pooling import keep_rows, kept_rows, likely_tokens, pool
from .sampler import NOT_FINITE, SampledToken, gather_logprobs, sample, sample_async
from .sequence_state import SequenceState
from .staging import StagingBuffers

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
        grammars: GrammarFactory | None = None,
        invariant: bool = False,
        prompt_attention: str = "causal",
        kernels: str = "",
        async_scheduling: bool = False,
    ) -> None:
        """Allocate the KV caches.

        Args:
            num_blocks: number of blocks of each cache group.
            grammars: compiles structured outputs; None without a tokenizer.
            prompt_attention: as in SchedulerLimits. kernels: as in EngineConfig.
            async_scheduling: a step may start before the tokens of the last one are on the host, and items are encoded
                beside steps that do not read them.
        """
        self.model, self.device, self.store, self.grammars = model, device, store, grammars
        groups = group_layers(model.cache_specs)
        self._specs, self._num_blocks = model.cache_specs, num_blocks
        specs = [group.spec for group in groups]
        self.caches = KVCaches(self._allocate(block_size), group_of_layer(groups), specs, block_size, invariant)
        self.prompt_attention, self.kernels = prompt_attention, kernels
        self.sequences: dict[str, SequenceState] = {}
        self.decode_graphs, self.staging, self.async_scheduling = DecodeGraphs(device), StagingBuffers(device), async_scheduling
        self.encoder_runner = EncoderRunner(store, device)

    def sleep(self, empty: Model) -> None:
        """Free weights, caches and all state of sequences. `empty`: the model without weights."""
        self.model, self.caches = empty, replace(self.caches, tensors=())
        self.sequences.clear()
        self.encoder_runner.clear()
        self.decode_graphs, self.staging = DecodeGraphs(self.device), StagingBuffers(self.device)
        gc.collect()
        _release_free_memory(self.device)

    def wake_up(self, make: Callable[[], Model]) -> None:
        """Allocate the caches and make the model again. If `make` raises, the runner stays asleep."""
        tensors = self._allocate(self.caches.block_size)
        self.model = make()
        self.caches = replace(self.caches, tensors=tensors)
        _release_free_memory(self.device)

    def _allocate(self, block_size: int) -> Sequence[Tensor]:
        return allocate_caches(self._specs, self._num_blocks, block_size, self.device)

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
        items = [self.sequences[task.request_id].item(task.index) for task in output.encode]
        encoded = () if self.async_scheduling else self.encoder_runner.encode(self.model, items)
        scheduled, results = self._split_failed(output.scheduled, encoded)
        hidden, starts = self._forward(scheduled, previous) if scheduled else (None, ())
        if self.async_scheduling:  # after the forward was launched, which reads none of these items: both run at once
            self.encoder_runner.submit(self.model, items)
        if hidden is not None:
            if self.async_scheduling and all(_can_sample_async(*one) for one in scheduled):
                return self._sample_async(scheduled, hidden, starts)
            results.update((result.request_id, result) for result in self._sample_and_pool(scheduled, hidden, starts))
        tokens = tuple(results[task.request_id] for task in output.scheduled)
        return AsyncStepOutput(lambda: StepOutput(tokens, encoded or self._poll_encoder(wait=not tokens)))

    def _update_states(self, output: SchedulerOutput) -> None:
        for request_id in output.finished:
            sequence = self.sequences.pop(request_id, None)
            stream = sequence.features[0].stream if sequence is not None and sequence.features else None
            if stream is not None and isinstance(self.model, SupportsStreams):
                self.model.free_stream(stream)
        self.encoder_runner.discard(output.free_encoder)
        if output.zero_blocks:
            for tensor, own in zip(self.caches.tensors, self.caches.group_of, strict=True):
                tensor[:, [block for group, block in output.zero_blocks if group == own]] = 0
        for request in output.new_requests:
            self.sequences[request.request_id] = SequenceState(
                request, self.model.rope_axes, self.prompt_attention, self.grammars
            )
        for change in output.updates:
            self.sequences[change.request_id].update(change)
        for task in output.scheduled:
            if task.sample:  # an interrupted step may have left a token that was never returned
                del self.sequences[task.request_id].token_ids[task.num_computed + task.num_tokens :]

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
                cross = sequence.request.cross
                error = errors[failed].for_item(*find_item(sequence.features if cross is None else [cross], failed))
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
        of_model = model.routes_by_modality, model.adapters, model.hidden_size
        batch = build_batch(scheduled, self.store.rows, self.caches, self.staging, *of_model)
        if previous is not None:
            assert previous.sampled_token_ids is not None, "the previous step has no tokens on the device"
            index = self.staging(np.array([previous.request_index[task.request_id] for _, task in scheduled]))
            batch = replace(batch, input_ids=previous.sampled_token_ids.index_select(0, index))
        return self.decode_graphs(model.forward, batch), [0, *accumulate(task.num_tokens for _, task in scheduled)]

    def _sample_async(self, scheduled: Sequence[ScheduledSequence], hidden: Tensor, starts: Sequence[int]) -> AsyncStepOutput:
        """Sample a token for every sequence on the device; `get_output` reads them later."""
        logits = self.model.compute_logits(self._select_rows(hidden, [stop - 1 for stop in starts[1:]]))
        first, task = scheduled[0]
        ahead = task.num_computed + task.num_tokens - len(first.token_ids)
        sampled = sample_async(logits, [sequence.sampling for sequence, _ in scheduled], self.staging, ahead)
        read_finite = copy_to_host(is_finite(hidden))

        def get_output() -> StepOutput:
            row_is_finite, results = read_finite(), []
            for (sequence, task), found, start, stop in zip(scheduled, sampled.get(), starts, starts[1:], strict=False):
                good = all(row_is_finite[start:stop])
                results.append(_append_token(sequence, found) if good else TokenOutput(task.request_id, (), error=NOT_FINITE))
            return StepOutput(tuple(results), self._poll_encoder(wait=False))

        index = {task.request_id: i for i, (_, task) in enumerate(scheduled)}
        return AsyncStepOutput(get_output, index, sampled.sampled_token_ids)

    def _sample_and_pool(self, scheduled: list[ScheduledSequence], hidden: Tensor, starts: Sequence[int]) -> list[TokenOutput]:
        """Return each sequence's token, pooled output or prompt log probabilities."""
        # hidden states need no check in a step that samples every row, because the sampler checks the logits
        decode = all(task.sample and task.num_tokens == 1 and sequence.request.pooling is None for sequence, task in scheduled)
        row_is_finite = [True] * starts[-1] if decode else is_finite(hidden).tolist()
        finite = [all(row_is_finite[start:stop]) for start, stop in pairwise(starts)]
        kept = [
            (sequence, hidden[start:stop], task.num_computed)
            for (sequence, task), start, stop, good in zip(scheduled, starts, starts[1:], finite, strict=False)
            if good and sequence.request.pooling is not None and sequence.request.pooling.pools_rows
        ]
        keep_rows(kept, self.model)
        last_rows = [
            (sequence, stop - 1)
            for (sequence, task), stop, good in zip(scheduled, starts[1:], finite, strict=True)
            if task.sample and good
        ]
        prompt_logprobs = [
            self._prompt_logprobs(sequence, task, hidden, start) if good else None
            for (sequence, task), start, good in zip(scheduled, starts, finite, strict=False)
        ]
        pooling = [(one, one[0].request.pooling) for one in last_rows]
        results = self._pool([one for one, params in pooling if params is not None and not params.candidates], hidden)
        results |= self._find_candidates([one for one, params in pooling if params is not None and params.candidates], hidden)
        results |= self._sample([one for one, params in pooling if params is None], hidden)
        outputs = []
        for (_, task), found, good in zip(scheduled, prompt_logprobs, finite, strict=True):
            output = results.get(task.request_id) or TokenOutput(task.request_id, (), error=None if good else NOT_FINITE)
            outputs.append(output if found is None else replace(output, prompt_logprobs=found))
        return outputs

    def _sample(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Sample a token for each sequence from its last row. A sequence that cannot be sampled fails alone."""

        def attempt(part: Sequence[tuple[SequenceState, int]]) -> list[SampledToken | Exception]:
            logits = self.model.compute_logits(self._select_rows(hidden, [row for _, row in part]))
            return sample(logits, [sequence.sampling for sequence, _ in part], self.staging)

        found = isolate_failures(last_rows, attempt)
        return {
            sequence.request.request_id: _append_token(sequence, one)
            for (sequence, _), one in zip(last_rows, found, strict=True)
        }

    def _pool(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Pool the last rows, or the kept ones, of sequences that ask for it instead of an answer."""
        if not last_rows:
            return {}
        params = {sequence.request.request_id: sequence.request.pooling or PoolingParams() for sequence, _ in last_rows}
        own_rows = [kept_rows(one, hidden[row : row + 1], self.model) for one, row in last_rows]
        pooled = pool(own_rows, list(params.values()), self.model)
        weights = [sequence.cross_weights for sequence, _ in last_rows]
        found = [vector if own is None else own for vector, own in zip(pooled, weights, strict=True)]
        return {name: _pooled(name, vector) for name, vector in zip(params, found, strict=True)}

    def _find_candidates(self, last_rows: Sequence[tuple[SequenceState, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """Return the likeliest next tokens of each sequence. A sequence whose logits processors fail fails alone."""

        def attempt(part: Sequence[tuple[SequenceState, int]]) -> list[Tensor | Exception]:
            return likely_tokens(hidden[[row for _, row in part]], [sequence for sequence, _ in part], self.model)

        found = zip(last_rows, isolate_failures(last_rows, attempt), strict=True)
        return {sequence.request.request_id: _pooled(sequence.request.request_id, one) for (sequence, _), one in found}

    def _select_rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Return `rows` of `hidden`. They must be distinct and in order."""
        return hidden if len(rows) == hidden.shape[0] else hidden[self.staging(np.array(rows))]

    def _prompt_logprobs(
        self, sequence: SequenceState, task: ScheduledRequest, hidden: Tensor, start: int
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Extend the prompt's log probabilities by this chunk. Returns all of them once the prompt is complete, else None.

        After a rollback into the prompt, the log probabilities of the remaining tokens are kept.
        """
        count, found = sequence.request.params.prompt_logprobs, sequence.prompt_logprobs
        if count is None or found is None:
            return None
        prompt = sequence.request.prompt_token_ids[: sequence.prompt_length]
        del found[len(prompt) :]
        if not found:
            found.append(None)  # nothing predicts the first token
        stop = min(task.num_computed + task.num_tokens, len(prompt) - 1)
        for first in range(len(found) - 1, stop, LOGITS_ROWS):
            last = min(first + LOGITS_ROWS, stop)
            base = start - task.num_computed
            logits = self.model.compute_logits(hidden[base + first : base + last])
            found.extend(gather_logprobs(logits, prompt[first + 1 : last + 1], count))
        if len(found) < len(prompt):
            return None
        sequence.prompt_logprobs = None
        return tuple(found)


def _release_free_memory(device: torch.device) -> None:
    """Return unused memory from the allocators to the device and the operating system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def _append_token(sequence: SequenceState, found: SampledToken | Exception) -> TokenOutput:
    """Append a sampled token to its sequence, and return its output."""
    name = sequence.request.request_id
    if isinstance(found, Exception):
        explained = isinstance(found, InputError) and found.__cause__ is None
        _log.warning("sampling failed", exc_info=None if explained else found)
        return TokenOutput(name, (), error=_sampling_error(found))
    sequence.token_ids.append(found.token)
    return TokenOutput(name, (found.token,), None if found.logprobs is None else (found.logprobs,))


def _pooled(name: str, found: Tensor | Exception) -> TokenOutput:
    if isinstance(found, Exception):
        return TokenOutput(name, (), error=_sampling_error(found))
    return TokenOutput(name, (), pooled=found) if found.isfinite().all() else TokenOutput(name, (), error=NOT_FINITE)


def _sampling_error(error: Exception) -> ErrorInfo:
    if isinstance(error, InputError):
        info = error.info
    else:
        info = ErrorInfo("out_of_memory" if is_out_of_memory(error) else "internal", error_text(error))
    if info.code == "not_finite":
        return info
    return replace(info, message=f"sampling failed: {info.message}; send the request again with other parameters")


def _can_sample_async(sequence: SequenceState, task: ScheduledRequest) -> bool:
    """True if the step does nothing for this sequence but sample a token from unchanged logits."""
    more = sequence.request.pooling is not None or sequence.request.params.prompt_logprobs is not None
    return task.sample and not sequence.sampling.changes_logits and not more
