"""Decides which sequences compute how many tokens in the next step, and which items are encoded for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...callers.errors import ErrorInfo, InputError
from ...mm.types import find_item
from ..bidirectional_spans import fit_chunk
from ..drafts.drafter import Drafter
from ..kv_cache.block_pool import BlockPools
from ..kv_cache.block_tables import BlockTables
from ..stats import EngineStats
from ..types import (
    EncodeResult,
    EncodeTask,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenOutput,
)
from .encoder_cache import EncoderCache
from .encoder_inputs import EncoderInputs
from .kv_transfers import KVTransfers
from .limits import SchedulerLimits
from .policy import SchedulingPolicy
from .quarantine import Quarantine
from .repetition import Loop, find_loop
from .request import Request, State
from .sequences import Sequences
from .step_drafts import StepDrafts
from .worker_messages import is_empty


@dataclass
class _Step:
    """The step that `schedule` is building."""

    budget: int  # tokens it still has room for
    encoder_budget: int  # rows that encoders may still make
    cross_budget: int  # rows that may still be written to the caches of cross-attention
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    has_waiter: bool = False  # a sequence waits for pending rows and keeps those it has pinned


class Scheduler:
    """Continuous batching with chunked prefill.

    A step takes sequences with one token to compute first, then started prompts, then waiting ones in the order of its policy,
    until the token budget is spent. A prompt is cut into chunks outside its bidirectional spans, and before an item
    that cannot be encoded in this step.

    Why one sequence can always go on: only running sequences pin encoder rows, each until it has computed the item. A sequence
    that cannot go on pins nothing, except the first one that waits for pending rows. Any single item fits into the encoder
    cache, and so do all items that the first step of a sequence reads by cross-attention.

    Args:
        quarantine: refuses items that made the encoder fail.
        drafter: guesses the next tokens of sequences; None guesses nothing.
    """

    def __init__(
        self,
        block_pools: BlockPools,
        encoder_cache: EncoderCache,
        limits: SchedulerLimits,
        quarantine: Quarantine,
        policy: SchedulingPolicy,
        drafter: Drafter | None = None,
    ) -> None:
        self.block_pools, self.encoder_cache, self.limits = block_pools, encoder_cache, limits
        attention = limits.prompt_attention
        prefix_caching = limits.prefix_caching and not attention.whole_prompt
        self.block_tables = BlockTables(block_pools, prefix_caching, limits.max_num_batched_tokens)
        self.encoder_inputs = EncoderInputs(encoder_cache, quarantine, attention.is_at_once, beside=limits.encode_beside)
        self.limit = min(limits.max_model_len, block_pools.capacity)  # tokens of the longest sequence
        self.drafts = StepDrafts(self.block_tables, limits, self.limit, drafter)
        self.sequences = Sequences(self.block_tables, self.encoder_inputs, limits, self.limit, policy, self.drafts)
        self._queues, self._messages = self.sequences.queues, self.sequences.messages
        self.requests, self.waiting, self.running = self._queues.requests, self._queues.waiting, self._queues.running
        self.kv_transfers: KVTransfers | None = None
        self._steps = self._steps_ahead = self._cut_items = 0

    def use_connectors(self, saves: bool, loads: bool) -> None:
        """Save KV blocks through the connectors of the workers, and look for those of waiting sequences there."""
        self.kv_transfers = KVTransfers(self._queues, self.block_tables, self.limits, saves, loads)

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or None if there is nothing to do. `update_from_output` records it once it has run."""
        limits = self.limits
        step = _Step(limits.max_num_batched_tokens, limits.max_encoder_tokens, limits.max_step_cross_rows)
        self._queues.grow_running()
        self._queues.preempt_for_priority()
        self.drafts.plan(self.running)
        for request in self._queues.in_step_order():
            self._schedule_request(request, step)
        while self.waiting and step.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            if not self._queues.try_admit(self.waiting[0]):
                break
            self._schedule_request(self.running[-1], step)
        progress = step.scheduled or step.encode or self.encoder_cache.pending
        assert progress or not (self.waiting or self.running), "sequences wait and none can run"
        output = self._output(step.scheduled, step.encode)
        self.drafts.start_step(output)
        return output if self.encoder_cache.pending or not is_empty(output) else None

    def schedule_ahead(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Return the step after `output` while the tokens of `output` are not known: one more token per sequence.

        None if a sequence has guesses or may get some from those tokens, if a waiting sequence or a message for the worker
        has to go first, or if a running sequence that does not wait for pending rows was not sampled in `output`. A sequence
        that ends with its unknown token computes one token too many, into its own blocks.
        """
        if any(task.draft_token_ids for task in output.scheduled) or any(map(self.drafts.may_propose, self.running)):
            return None
        sampled = {task.request_id for task in output.scheduled if task.sample}
        if self._messages.must_go_first or self._queues.can_start_another():
            return None
        if not all(request.request_id in sampled or self.encoder_inputs.is_pending(request) for request in self.running):
            return None
        batch = [request for request in sorted(self.running, key=self._queues.policy.order) if request.request_id in sampled]
        batch = [request for request in batch if request.room(self.limit) > 1]
        if not batch or not all(self.block_tables.grow(request, 1, ahead=True) for request in batch):
            return None
        self._steps_ahead += 1
        skip = self.block_tables.skip_state
        tasks = [ScheduledRequest(r.request_id, len(r.token_ids), 1, skip(r.block_ids), epoch=r.epoch) for r in batch]
        return replace(self._output(tasks), ahead=True)

    def _output(self, scheduled: Sequence[ScheduledRequest], encode: Sequence[EncodeTask] = ()) -> SchedulerOutput:
        freed = self.encoder_cache.take_freed()
        messages = self._messages.take()
        output = replace(messages, step=self._steps, scheduled=tuple(scheduled), encode=tuple(encode), free_encoder=freed)
        if encode:
            self.encoder_inputs.start(encode)
        self._steps += bool(scheduled)
        return output

    def is_wanted(self, output: SchedulerOutput) -> bool:
        """Return whether any result of a step is still needed."""
        return any(map(self._is_wanted, output.scheduled))

    def _is_wanted(self, task: ScheduledRequest) -> bool:
        """Return True if the sequence still runs and the computed row is still its next one."""
        request = self.requests.get(task.request_id)
        return request is not None and request.state is State.RUNNING and request.epoch == task.epoch

    def update_from_output(self, output: SchedulerOutput, done: StepOutput) -> tuple[TokenOutput, ...]:
        """Record what a step computed. Return an output for each sequence that got tokens or ended.

        An output has a finish reason, timings and statistics if the answer is complete, and `num_removed` if a repetition loop
        was rolled back.
        """
        self.drafts.end_step(done)
        failed_items = self.encoder_inputs.record(done.encoded, self.requests)
        wanted = [self._is_wanted(task) for task in output.scheduled]  # recording a result changes what is still needed
        pairs = zip(wanted, output.scheduled, done.tokens, strict=True)
        outputs = [part for is_wanted, task, result in pairs if is_wanted for part in self._update(task, result)]
        return (*outputs, *self._fail_users(failed_items))

    def fail_step(self, output: SchedulerOutput, error: ErrorInfo) -> tuple[TokenOutput, ...]:
        """Record that a step failed: end its sequences and those that wait for its items. Return their outputs."""
        self._requeue(output)
        encoded = tuple(EncodeResult(task.hash, "", error) for task in output.encode)
        tokens = tuple(TokenOutput(task.request_id, (), error=error) for task in output.scheduled)
        return self.update_from_output(output, StepOutput(tokens, encoded))

    def undo(self, output: SchedulerOutput) -> None:
        """Undo an interrupted step: its items are not encoded, and its messages are sent again."""
        self.encoder_inputs.undo(output.encode)
        self._requeue(output)

    def _requeue(self, output: SchedulerOutput) -> None:
        """Send the messages of a step that was not completed again with the next one."""
        self._messages.requeue(output)
        self.encoder_cache.requeue_freed(output.free_encoder)

    def _update(self, scheduled: ScheduledRequest, output: TokenOutput) -> Sequence[TokenOutput]:
        """Record what a step computed for one sequence, and return its outputs."""
        if output.error is not None:
            return self._fail_or_repeat(scheduled, output)
        request = self.requests[scheduled.request_id]
        request.num_computed += scheduled.num_tokens
        if scheduled.draft_token_ids:
            request.num_computed -= scheduled.num_sampled - len(output.token_ids)
        finish, loop, num_kept = self._append_tokens(request, output.token_ids)
        if output.predicted:
            request.predicted = (len(request.token_ids), output.predicted if num_kept == len(output.token_ids) else ())
            output = replace(output, predicted=())
        if num_kept < len(output.token_ids):
            output = _first_tokens(output, num_kept)
            request.num_computed = len(request.token_ids) - 1
        if scheduled.draft_token_ids and num_kept < scheduled.num_sampled:
            self.block_tables.keep_states(request)
        if self.drafts.has_proposers:
            self.drafts.settle(request, len(scheduled.draft_token_ids))
        if scheduled.write_cross:
            self.block_tables.cache_cross_blocks(request)
        cached = self.block_tables.cache_full_blocks(request) + self.block_tables.advance_states(request)
        if self.kv_transfers is not None:
            self.kv_transfers.add_computed(request, cached)
        self.block_tables.free_behind_windows(request)
        if scheduled.draft_token_ids and num_kept < scheduled.num_sampled:
            self.block_tables.free_rejected(request)
        self.encoder_inputs.mark_computed(request)
        if output.pooled is not None:
            return (self.sequences.finish(request, output, "length"),)
        if finish is not None:
            return (self.sequences.finish(request, output, *finish),)
        return (output,) if loop is None else self._end_loop(request, output, loop)

    def _append_tokens(
        self, request: Request, token_ids: Sequence[int]
    ) -> tuple[tuple[str, int | None] | None, Loop | None, int]:
        """Append sampled tokens up to the one that ends the answer or completes a repetition loop.

        Return the finish reason, the loop, and the number of tokens appended.
        """
        if token_ids:
            request.times.setdefault("first_token", time.perf_counter())
        detection = request.message.params.repetition_detection
        for number, token in enumerate(token_ids, start=1):
            request.token_ids.append(token)
            finish = request.finish_reason(self.limit)
            if finish is not None:
                return finish, None, number
            loop = None if detection is None else find_loop(request.token_ids, request.turn_start, detection)
            if loop is not None:
                return None, loop, number
        return None, None, len(token_ids)

    def _fail_or_repeat(self, scheduled: ScheduledRequest, output: TokenOutput) -> Sequence[TokenOutput]:
        """End a sequence whose part of a step failed. If it had guesses, which may be at fault, compute it again without."""
        if not scheduled.draft_token_ids:
            return (self.sequences.fail(output, zero_blocks=True),)
        request = self.requests[scheduled.request_id]
        request.may_draft = False
        self._messages.send(zero_blocks=self.block_tables.unhashed_blocks(request))
        self._queues.preempt(request)
        return ()

    def _fail_users(self, failed: Sequence[tuple[EncodeTask, EncodeResult]]) -> list[TokenOutput]:
        """End the sequences that asked for a failed item and, if the item itself makes the encoder fail, all that have it."""
        outputs = []
        for task, result in failed:
            assert result.error is not None
            names = self.encoder_cache.users_of(result.hash) if result.item_failed else [task.request_id]
            for request in [self.requests[name] for name in names if name in self.requests]:
                error = result.error.for_item(*find_item([item for _, item in request.items()], result.hash))
                outputs.append(self.sequences.fail(TokenOutput(request.request_id, (), error=error)))
        return outputs

    def reset_prefix_cache(self) -> None:
        for pool in self.block_pools.pools:
            pool.reset_prefix_cache()

    def reset_caches(self) -> None:
        """Empty the prefix cache and the encoder cache. Sequences lose their blocks, and compute all their tokens again.

        Results of steps in flight become stale.
        """
        for request in [*self.requests.values()]:
            if request.state is State.RUNNING:
                self._queues.preempt(request)
            else:
                self._queues.free_blocks(request)
        self.reset_prefix_cache()
        self.encoder_inputs.reset()

    @property
    def encoding(self) -> list[str]:
        """Hashes of the items that workers encode and that are still needed."""
        return self.encoder_inputs.encoding

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of all, running and waiting sequences."""
        return len(self.requests), len(self.running), len(self.waiting)

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, and current values."""
        waiting = len(self.waiting) + (0 if self.kv_transfers is None else self.kv_transfers.num_loading)
        return EngineStats(
            running=len(self.running),
            waiting=waiting,
            idle=len(self.requests) - len(self.running) - waiting,
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            blocks=sum(pool.num_blocks for pool in self.block_pools.pools),
            blocks_used=sum(pool.num_blocks - pool.num_free for pool in self.block_pools.pools),
            blocks_cached=sum(pool.num_cached for pool in self.block_pools.pools),
            kv_usage=self.block_pools.usage,
            prefix_queries=self.block_tables.queries,
            prefix_hits=self.block_tables.hits,
            prefix_evictions=sum(pool.evictions for pool in self.block_pools.pools),
            encoder_calls=self.encoder_inputs.calls,
            encoder_disk_hits=self.encoder_inputs.disk_hits,
            encoder_hits=self.encoder_cache.hits,
            encoder_evictions=self.encoder_cache.evictions,
            encoder_bytes=self.encoder_cache.bytes,
            encoder_capacity=self.encoder_cache.capacity,
            preemptions=self._queues.preemptions,
            cut_items=self._cut_items,
            quarantined=len(self.encoder_inputs.quarantine),
            drafts=self.drafts.stats,
            no_drafts=self.drafts.no_drafts,
        )

    def _schedule_request(self, request: Request, step: _Step) -> None:
        """Add a running sequence to the step, with as many tokens as budgets, spans and encoder rows allow."""
        cross_rows = 0 if request.cross_written else request.cross_rows
        if cross_rows > step.cross_budget and step.cross_budget < self.limits.max_step_cross_rows:
            return  # the first one may exceed the budget
        start, spans = request.num_computed, request.spans(self.limits.prompt_attention)
        others = len(self.running) - 1  # each of them keeps a token of the budget
        drafts = self.drafts.take(request, step.budget - others)
        wanted = min(request.remaining + len(drafts), step.budget, self.limits.max_chunk)
        count = self.block_tables.end_at_window(request, self.block_tables.end_at_state(request, wanted))
        count = fit_chunk(start, count, step.budget, spans)
        ready, tasks = self.encoder_inputs.schedule(request, count, step.encoder_budget, first=not step.encode)
        count = fit_chunk(start, ready, ready, spans)
        if count == 0:
            keep = not step.has_waiter and self.encoder_inputs.is_pending(request)
            step.has_waiter |= keep
            tasks = self.encoder_inputs.skip(request, tasks, keep)
        step.encode += tasks
        step.encoder_budget -= sum(request.item(task.index).range.num_embeds for task in tasks)
        if count == 0:
            return
        drafts = drafts and drafts[: max(0, count - request.remaining)]
        step.scheduled.append(request.schedule(count, drafts, self.drafts.predicts(request)))
        step.budget -= count
        step.cross_budget -= cross_rows
        stop = start + count
        left = request.features[request.next_feature :]
        self._cut_items += any(f.range.offset < stop < f.range.end - f.geometry.ahead for f in left)

    def _end_loop(self, request: Request, output: TokenOutput, loop: Loop) -> Sequence[TokenOutput]:
        """End an answer that is in a repetition loop, or roll it back to the loop's start and forbid the loop.

        `output` has the tokens up to the one that completes the loop.
        """
        detection = request.message.params.repetition_detection
        assert detection is not None
        if not detection.repair or request.repairs >= detection.max_repairs:
            return (self.sequences.finish(request, output, "repetition"),)
        removed = len(request.token_ids) - loop.start
        request.repairs += 1
        try:
            self.sequences.truncate(request.request_id, loop.start, forbid=(loop.forbidden,))
        except InputError as error:
            return (self.sequences.fail(replace(output, error=error.info)),)
        # the token that completes the loop is never returned; those before it were, or are returned now
        before = len(output.token_ids) - 1
        if not before:
            return (replace(output, token_ids=(), logprobs=None, num_removed=removed - 1),)
        return _first_tokens(output, before), TokenOutput(request.request_id, (), num_removed=removed - 1)


def _first_tokens(output: TokenOutput, count: int) -> TokenOutput:
    """Return an output with the first of its tokens only."""
    return replace(output, token_ids=output.token_ids[:count], logprobs=output.logprobs and output.logprobs[:count])
