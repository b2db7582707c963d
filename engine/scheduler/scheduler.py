"""Decides which sequences compute how many tokens in the next step, and which items are encoded for them."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ...mm.errors import InputError
from ...mm.types import MultiModalFeature
from ..bidirectional_spans import BidirectionalSpan, find_spans, fit_chunk
from ..kv_cache.block_pool import BlockPools
from ..kv_cache.block_tables import BlockTables
from ..types import EncodeTask, EngineRequest, EngineStats, RequestUpdate, ScheduledRequest, SchedulerOutput, TokenOutput
from .encoder_cache import EncoderCache
from .encoder_inputs import EncoderInputs
from .limits import SchedulerLimits, check_cross, check_features, check_length, check_spans
from .repetition import find_loop
from .request import Request, State

_ORDER = attrgetter("order")
_NO_MESSAGES = SchedulerOutput(step=0, scheduled=())


@dataclass
class _Step:
    """The step that `schedule` is building."""

    budget: int  # tokens it still has room for
    encoder_budget: int  # rows that encoders may still make
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    has_waiter: bool = False  # a sequence waits for pending rows and keeps those it has pinned


class Scheduler:
    """Continuous batching with chunked prefill.

    A step takes sequences with one token to compute first, then started prompts, then waiting ones in order of (priority,
    arrival), until the token budget is spent. A prompt is cut into chunks outside its bidirectional spans, and before an item
    that cannot be encoded in this step. A sequence is admitted if the pools have blocks for all its tokens except shared
    prefixes. When blocks run out, idle and waiting sequences lose theirs first, then the running one that is last in order.

    Why one sequence can always go on: only running sequences pin encoder rows, each until it has computed the item. A sequence
    that cannot go on pins nothing, except the first one that waits for pending rows. Every single item fits into the encoder
    cache.
    """

    def __init__(self, block_pools: BlockPools, encoder_cache: EncoderCache, limits: SchedulerLimits) -> None:
        self.block_pools, self.encoder_cache, self.limits = block_pools, encoder_cache, limits
        bidirectional = limits.prompt_attention == "bidirectional_prompt"
        all_at_once = limits.prompt_attention in ("bidirectional_prompt", "bidirectional_media")
        self.block_tables = BlockTables(block_pools, limits.prefix_caching and not bidirectional, limits.max_num_batched_tokens)
        self.encoder_inputs = EncoderInputs(encoder_cache, all_at_once, beside=limits.encode_beside)
        self.limit = min(limits.max_model_len, block_pools.capacity)  # tokens of the longest sequence
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by order
        self.running: list[Request] = []
        self._arrivals = self._steps = self._steps_ahead = self._preemptions = self._cut_items = 0
        self._pending = _NO_MESSAGES  # messages that the worker gets with the next step

    def add(self, message: EngineRequest) -> None:
        """Queue a sequence. Raise InputError, and change nothing, for a prompt that could never run."""
        if message.request_id in self.requests:
            raise InputError(f"request {message.request_id!r} is already being served")
        check_features(message.features, 0, len(message.prompt_token_ids))
        request = Request(message, self._arrivals, self.block_pools.empty)
        has_cross_attention = any(spec.kind == "cross" for spec in self.block_pools.specs)
        optional = any(spec.optional for spec in self.block_pools.specs)
        check_cross(request.cross_rows, self.block_pools.capacity, has_cross_attention, optional)
        self._check(request)
        self._renew_spans(request, ())
        self.encoder_inputs.register(request, request.items())
        self._arrivals += 1
        self.requests[message.request_id] = request
        self._send(new_requests=(message,))
        insort(self.waiting, request, key=_ORDER)

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None:
        """Add tokens to a live sequence and begin a new answer.

        `close`: end the sequence after that answer or, without tokens, as soon as it is idle. `adapter`: as in RequestUpdate.
        """
        request = self._get_live(request_id)
        has_rows = bool(features) and features[-1].geometry.ahead > 0
        if not token_ids and not has_rows and not (close and not features):
            raise InputError("nothing to append; give at least one token")
        if token_ids or has_rows:
            self._append(request, token_ids, features, adapter)
        if close:
            request.hold_open = False
            if request.state is State.IDLE:
                self.abort(request_id)

    def _append(
        self, request: Request, token_ids: Sequence[int], features: Sequence[MultiModalFeature], adapter: str | None
    ) -> None:
        num_items, length, turn = len(request.features), len(request.token_ids), request.turn_start
        spans = self._spans(request)
        request.append(token_ids, features)
        try:
            self._check(request)
            self.encoder_inputs.register(request, list(enumerate(request.features))[num_items:])
        except InputError:
            del request.features[num_items:], request.token_ids[length:]
            request.turn_start = turn
            raise
        request.repairs = 0
        request.epoch += 1
        update = RequestUpdate(request.request_id, length, tuple(token_ids), tuple(features), restart=True, adapter=adapter)
        self._send(updates=(update,))
        has_new_adapter = adapter is not None and request.set_adapter(adapter)
        if self._renew_spans(request, spans) or has_new_adapter:
            self._free_blocks(request)
        if request.state is State.IDLE:  # it keeps its blocks while it waits, unless another sequence needs them
            self._enqueue(request)

    def truncate(self, request_id: str, num_tokens: int, forbid: tuple[tuple[int, ...], ...] = ()) -> None:
        """Roll a sequence back to its first `num_tokens` tokens. Computed blocks of these tokens are kept where possible."""
        request = self._get_live(request_id)
        dropped = [(f.hash, request.item_user(i)) for i, f in enumerate(request.features) if f.range.offset >= num_tokens]
        spans = self._spans(request)
        request.truncate(num_tokens, self.block_pools.block_size)
        if self._renew_spans(request, spans):
            request.rewind(0)  # the remaining tokens attended to the removed ones
        for key, user in dropped:
            self.encoder_cache.unregister(key, user)
        self.block_tables.roll_back(request, self._spans(request))
        self._send(updates=(RequestUpdate(request_id, num_tokens, forbid=forbid),))

    def pause(self, request_id: str) -> None:
        """End the current answer of a sequence that is held open."""
        request = self._get_live(request_id)
        if request.state is State.WAITING:  # it was preempted
            self.waiting.remove(request)
            request.state = State.IDLE
        elif request.state is State.RUNNING:
            self._end_answer(request)

    def abort(self, request_id: str) -> None:
        """Free everything a sequence holds. Unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        self.encoder_inputs.unregister(request)
        self.block_tables.free(request)
        self._pending = replace(  # drops unsent messages about the sequence
            self._pending,
            new_requests=tuple(one for one in self._pending.new_requests if one.request_id != request_id),
            updates=tuple(update for update in self._pending.updates if update.request_id != request_id),
            finished=(*self._pending.finished, request_id),
        )

    def schedule(self) -> SchedulerOutput:
        """Return the next step. `update_from_output` records it once it has run."""
        step = _Step(self.limits.max_num_batched_tokens, self.limits.max_encoder_tokens)
        self._grow_running()
        self._preempt_for_priority()
        for request in sorted(self.running, key=lambda request: (request.remaining > 1, request.order)):
            self._schedule_request(request, step)
        while self.waiting and step.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            if not self._try_admit(self.waiting[0]):
                break
            self._schedule_request(self.running[-1], step)
        progress = step.scheduled or step.encode or self.encoder_cache.pending
        assert progress or not (self.waiting or self.running), "sequences wait and none can run"
        return self._output(step.scheduled, step.encode)

    def schedule_ahead(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Return the step after `output` while the tokens of `output` are not known: one more token per sequence.

        None if a waiting sequence or a message for the worker has to go first, or if a running sequence that does not wait for
        pending rows was not sampled in `output`. A sequence that ends with its unknown token computes one token too many, into
        its own blocks.
        """
        sampled = {task.request_id for task in output.scheduled if task.sample}
        pending = self._pending
        if pending.new_requests or pending.updates or pending.zero_blocks or self._can_start_another():
            return None
        if not all(request.request_id in sampled or self.encoder_inputs.is_pending(request) for request in self.running):
            return None
        batch = [request for request in sorted(self.running, key=_ORDER) if request.request_id in sampled]
        batch = [request for request in batch if request.has_room_after_next(self.limit)]
        if not batch or not all(self.block_tables.grow(request, ahead=True) for request in batch):
            return None
        self._steps_ahead += 1
        skip = self.block_tables.skip_state
        return self._output([ScheduledRequest(r.request_id, len(r.token_ids), 1, skip(r.block_ids)) for r in batch])

    def _output(self, scheduled: Sequence[ScheduledRequest], encode: Sequence[EncodeTask] = ()) -> SchedulerOutput:
        freed = self.encoder_cache.take_freed()
        messages, self._pending = self._pending, _NO_MESSAGES
        output = replace(messages, step=self._steps, scheduled=tuple(scheduled), encode=tuple(encode), free_encoder=freed)
        self._steps += bool(scheduled)
        return output

    def _send(self, **messages: Any) -> None:
        """Send messages to the worker with the next step. `messages`: fields of SchedulerOutput."""
        self._pending = replace(self._pending, **{name: getattr(self._pending, name) + new for name, new in messages.items()})

    def requeue_messages(self, output: SchedulerOutput) -> None:
        """Send the messages of a failed step again with the next step; receiving them twice is harmless."""
        names = ("new_requests", "updates", "finished", "zero_blocks")
        self._pending = replace(self._pending, **{name: getattr(output, name) + getattr(self._pending, name) for name in names})
        self.encoder_cache.requeue_freed(output.free_encoder)

    def update_from_output(self, scheduled: ScheduledRequest, output: TokenOutput) -> TokenOutput:
        """Record what a step computed for one sequence.

        Returns the output with its finish reason, timings and statistics if the answer is complete, or with `num_removed` if
        a repetition loop was rolled back.
        """
        if output.error is not None:
            return self.fail(output, zero_blocks=True)
        request = self.requests[scheduled.request_id]
        request.num_computed += scheduled.num_tokens
        if scheduled.write_cross:
            self.block_tables.cache_cross_blocks(request)
        self.block_tables.cache_full_blocks(request)
        self.block_tables.advance_states(request)
        self.block_tables.free_behind_windows(request)
        self.encoder_inputs.mark_computed(request)
        if output.pooled is not None:
            return self._finish(request, output, "length")
        if not output.token_ids:
            return output
        request.times.setdefault("first_token", time.perf_counter())
        request.token_ids += output.token_ids
        finish = request.finish_reason(self.limit)
        return self._check_loop(request, output) if finish is None else self._finish(request, output, *finish)

    def fail(self, output: TokenOutput, zero_blocks: bool = False) -> TokenOutput:
        """End a sequence with the error in `output` and return its last output.

        `zero_blocks`: zero its blocks, which may hold NaN, except those that earlier steps have completed.
        """
        request = self.requests[output.request_id]
        if zero_blocks:
            self._send(zero_blocks=self.block_tables.unhashed_blocks(request))
        self.abort(output.request_id)
        return request.final_output(replace(output, finish_reason="error"))

    def reset_prefix_cache(self) -> None:
        for pool in self.block_pools.pools:
            pool.reset_prefix_cache()

    def reset_caches(self) -> None:
        """Empty the prefix cache and the encoder cache, and drop all messages for the worker. No sequence may be live."""
        self.reset_prefix_cache()
        self.encoder_cache.reset()
        self._output(())

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            idle=len(self.requests) - len(self.running) - len(self.waiting),
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            blocks=sum(pool.num_blocks for pool in self.block_pools.pools),
            blocks_used=sum(pool.num_blocks - pool.num_free for pool in self.block_pools.pools),
            blocks_cached=sum(pool.num_cached for pool in self.block_pools.pools),
            kv_usage=self.block_pools.usage,
            prefix_queries=self.block_tables.queries,
            prefix_hits=self.block_tables.hits,
            prefix_evictions=sum(pool.evictions for pool in self.block_pools.pools),
            encoder_hits=self.encoder_cache.hits,
            encoder_evictions=self.encoder_cache.evictions,
            encoder_bytes=self.encoder_cache.bytes,
            encoder_capacity=self.encoder_cache.capacity,
            preemptions=self._preemptions,
            cut_items=self._cut_items,
        )

    def _can_start_another(self) -> bool:
        """Return whether the batch has a place for the first waiting sequence, or a sequence of lower priority."""
        if not self.waiting or len(self.running) < self.limits.max_num_seqs:
            return bool(self.waiting)
        return any(self.waiting[0].message.priority < request.message.priority for request in self.running)

    def _grow_running(self) -> None:
        """Allocate a block for each running sequence that needs one for its next token; preempt if there is none."""
        for request in list(self.running):
            while request.state is State.RUNNING:
                if self.block_tables.grow(request):
                    break
                self._preempt(self._pick_victim(request) or max(self.running, key=_ORDER))

    def _preempt_for_priority(self) -> None:
        """Preempt running sequences while one with a more urgent priority waits and cannot be admitted."""
        while self.waiting and self.running:
            first, last = self.waiting[0], max(self.running, key=_ORDER)
            has_place = len(self.running) < self.limits.max_num_seqs
            if last.message.priority <= first.message.priority or (has_place and self._try_admit(first)):
                return
            self._preempt(last)

    def _try_admit(self, request: Request) -> bool:
        """Allocate blocks for all tokens of a waiting sequence and run it. Return False if there are too few blocks."""
        has_blocks = any(request.block_ids)
        while not (
            self.block_tables.grow(request) if has_blocks else self.block_tables.allocate(request, self._spans(request))
        ):
            victim = self._pick_victim(request)
            if victim is None:
                return False
            self._preempt(victim)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        request.times.setdefault("scheduled", time.perf_counter())
        return True

    def _pick_victim(self, keep: Request) -> Request | None:
        """Return a sequence that holds blocks but does not run: an idle one, else the last of the waiting ones."""
        idle = (request for request in self.requests.values() if request.state is State.IDLE)
        candidates = (request for request in (*idle, *reversed(self.waiting)) if request is not keep and any(request.block_ids))
        return next(candidates, None)

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._preemptions += 1
        self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        """Free a sequence's blocks. It will be computed again, except for what the prefix cache still has."""
        self.block_tables.free(request)
        self.encoder_inputs.unpin(request)
        self.encoder_inputs.discard_chunks(request)  # the encoder's state is that of the last chunk: it begins again, too
        request.epoch += 1
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=_ORDER)

    def _schedule_request(self, request: Request, step: _Step) -> None:
        """Add a running sequence to the step, with as many tokens as budgets, spans and encoder rows allow."""
        start, spans = request.num_computed, self._spans(request)
        count = self.block_tables.end_at_state(request, min(request.remaining, step.budget, self.limits.max_chunk))
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
        step.scheduled.append(request.schedule(count))
        step.budget -= count
        stop = start + count
        left = request.features[request.next_feature :]
        self._cut_items += any(f.range.offset < stop < f.range.end - f.geometry.ahead for f in left)

    def _spans(self, request: Request) -> Sequence[BidirectionalSpan]:
        return find_spans(self.limits.prompt_attention, request.prompt_length, request.features)

    def _renew_spans(self, request: Request, before: Sequence[BidirectionalSpan]) -> bool:
        """Update what depends on a sequence's spans, which were `before`. Return True if computed tokens are stale."""
        spans = self._spans(request)
        if self.limits.prompt_attention == "bidirectional_media":  # whole prompts whose items see each other
            request.bind_hashes(spans[0][1] if spans and spans[0][0] == 0 else 0)
        return any(first < request.num_computed for first, _ in {*before} ^ {*spans})

    def _check_loop(self, request: Request, output: TokenOutput) -> TokenOutput:
        """End an answer that is in a repetition loop, or roll it back to the loop's start and forbid the loop."""
        detection = request.message.params.repetition_detection
        loop = None if detection is None else find_loop(request.token_ids, request.turn_start, detection)
        if detection is None or loop is None:
            return output
        if not detection.repair or request.repairs >= detection.max_repairs:
            return self._finish(request, output, "repetition")
        removed = len(request.token_ids) - loop.start
        request.repairs += 1
        try:
            self.truncate(request.request_id, loop.start, forbid=(loop.forbidden,))
        except InputError as error:
            return self.fail(replace(output, error=error.info))
        return replace(output, token_ids=(), logprobs=None, num_removed=removed - 1)  # the newest was never returned

    def _finish(self, request: Request, output: TokenOutput, reason: str, stop_token: int | None = None) -> TokenOutput:
        self._end_answer(request)
        return request.final_output(replace(output, finish_reason=reason, stop_reason=stop_token))

    def _end_answer(self, request: Request) -> None:
        if request.hold_open:
            self.running.remove(request)
            request.state = State.IDLE
        else:
            self.abort(request.request_id)

    def _get_live(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise InputError(f"request {request_id!r} is not being served")
        return self.requests[request_id]

    def _check(self, request: Request) -> None:
        check_length(len(request.token_ids), self.limit)
        max_tokens = self.limits.max_num_batched_tokens - self.limits.max_num_seqs + 1  # a token for each of the others
        max_rows = self.encoder_cache.capacity // max(1, self.encoder_cache.row_bytes)
        check_spans(self._spans(request), request.features, request.cross_rows, max_tokens, max_rows)
