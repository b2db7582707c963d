"""Which sequences compute how many tokens in the next step, in which blocks. Knows no tensor and no model."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .admission import SchedulerLimits, check_atoms, check_cross, check_features, check_length
from .atoms import Atom, atoms, clip
from .block_tables import BlockTables
from .encoder_cache import EncoderCache
from .item_rows import ItemRows
from .kv import KVBlocks
from .repetition import find_loop
from .request import Request, State
from .types import EncodeTask, EngineRequest, EngineStats, RequestUpdate, ScheduledRequest, SchedulerOutput

_ORDER = attrgetter("order")


@dataclass
class _Step:
    """A step being put together."""

    budget: int
    encoder_budget: int
    chunks: dict[str, int] = field(default_factory=dict)
    encode: list[EncodeTask] = field(default_factory=list)
    waits: bool = False  # a sequence does, for rows that are coming, and keeps those that are there


@dataclass(frozen=True)
class Advance:
    """What a step's token meant: the answer is complete (`finish_reason`), or `num_removed` tokens were taken back."""

    finish_reason: str | None = None
    stop_token: int | None = None
    num_removed: int = 0


class Scheduler:
    """Continuous batching with chunked prefill.

    Rows of a step go to sequences with one token to compute first, then to started prompts, then to waiting ones in
    order of (priority, arrival), as far as the token budget reaches. A prompt may be cut where its family allows it, and is
    cut before an item whose rows cannot be made in this step. A sequence is admitted when the pool has blocks for all its
    known tokens, less those it shares with earlier ones. When an answer finds no block to grow into, or a more urgent
    sequence none to start with, idle sequences lose theirs first, then the running one with the largest (priority, arrival).

    Progress: only running sequences keep encoder rows from being dropped, each until it has computed the item; a sequence at
    the start of an item keeps none, except the first of those that wait for rows made beside steps. So there is always one
    that can go on, and one item always fits.
    """

    def __init__(self, kv: KVBlocks, encoder: EncoderCache, limits: SchedulerLimits) -> None:
        self.kv, self.encoder, self.limits = kv, encoder, limits
        caching = limits.prefix_caching and limits.prefill != "prompt_atomic"
        self.tables = BlockTables(kv, caching, limits.max_num_batched_tokens)
        self.items = ItemRows(encoder, limits.prefill == "prompt_atomic", limits.encode_beside)
        self.limit = min(limits.max_model_len, kv.capacity)  # tokens of the longest sequence
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by order
        self.running: list[Request] = []
        self._arrivals = self._steps = self._steps_ahead = self._preemptions = self._cut_items = 0
        self._new: list[EngineRequest] = []
        self._updates: list[RequestUpdate] = []
        self._finished: list[str] = []
        self._unclean: list[list[int]] = [[] for _ in kv.pools]

    def add(self, message: EngineRequest) -> None:
        """InputError for a prompt that could never run; then nothing is changed."""
        if message.request_id in self.requests:
            raise InputError(f"request {message.request_id!r} is already being served")
        check_features(message.features, 0, len(message.prompt_token_ids))
        request = Request.new(message, self._arrivals, self.kv.empty)
        check_cross(request.cross_rows, self.kv.capacity, any(spec.kind == "cross" for spec in self.kv.specs))
        self._check(request)
        self.items.hold(request, request.items())
        self._arrivals += 1
        self.requests[message.request_id] = request
        self._new.append(message)
        insort(self.waiting, request, key=_ORDER)

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None:
        """New tokens, and with them a new answer; `close`: the last of both, without tokens the end as soon as it is idle.

        `adapter`: as in RequestUpdate.
        """
        request = self._live(request_id)
        if not token_ids and not (close and not features):
            raise InputError("nothing to append; give at least one token")
        if token_ids:
            self._append(request, token_ids, features, adapter)
        if close:
            request.hold_open = False
            if request.state is State.IDLE:
                self.abort(request_id)

    def _append(
        self, request: Request, token_ids: Sequence[int], features: Sequence[MultiModalFeature], adapter: str | None
    ) -> None:
        known, length, turn = len(request.features), len(request.token_ids), request.turn_start
        request.append(token_ids, features)
        try:
            self._check(request)
            self.items.hold(request, [(index, request.features[index]) for index in range(known, len(request.features))])
        except InputError:
            del request.features[known:], request.token_ids[length:]
            request.turn_start = turn
            raise
        request.repairs = 0
        request.epoch += 1
        update = RequestUpdate(request.request_id, length, tuple(token_ids), tuple(features), restart=True, adapter=adapter)
        self._updates.append(update)
        if adapter is not None and request.adapt(adapter):
            self._take_blocks(request)
        if request.state is State.IDLE:  # it keeps its blocks while it waits, unless another needs them
            self._wake(request)

    def truncate(self, request_id: str, num_tokens: int, forbid: tuple[tuple[int, ...], ...] = ()) -> None:
        """Roll back; what was computed of the tokens that stay is kept where nobody else reads the block they end in."""
        request = self._live(request_id)
        dropped = [(f.hash, request.user(i)) for i, f in enumerate(request.features) if f.range.offset >= num_tokens]
        cuts_atom = self.limits.prefill == "prompt_atomic" and num_tokens < request.prompt_length
        request.truncate(num_tokens, self.kv.block_size)
        if cuts_atom:
            request.rewind(0)  # what stays was computed with what goes in sight
        for key, user in dropped:
            self.encoder.release(key, user)
        self.tables.roll_back(request, self._atoms(request))
        self._updates.append(RequestUpdate(request_id, num_tokens, forbid=forbid))

    def rest(self, request_id: str) -> None:
        """End an answer that would go on: its sequence waits for more."""
        request = self._live(request_id)
        if request.state is State.WAITING:  # it was to be computed anew
            self.waiting.remove(request)
            request.state = State.IDLE
        elif request.state is State.RUNNING:
            self._end(request)

    def abort(self, request_id: str, unclean: bool = False) -> bool:
        """Free everything a sequence holds; False if there is none of that name. `unclean`: its blocks may hold NaN."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        self.items.release(request)
        if unclean:
            for blocks, held in zip(self._unclean, self.tables.unnamed(request), strict=True):
                blocks += held
        self.tables.drop(request)
        self._new = [message for message in self._new if message.request_id != request_id]
        self._updates = [update for update in self._updates if update.request_id != request_id]
        self._finished.append(request_id)
        return True

    def schedule(self) -> SchedulerOutput:
        """The next step. Computed counts advance in `advance`, once it has run."""
        step = _Step(self.limits.max_num_batched_tokens, self.limits.max_encoder_tokens)
        self._grow_running()
        self._make_way()
        for request in sorted(self.running, key=lambda request: (request.remaining > 1, request.order)):
            self._take(request, step)
        while self.waiting and step.budget > 0 and len(self.running) < self.limits.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            self._take(self.running[-1], step)
        going = step.chunks or step.encode or self.encoder.coming
        assert going or not (self.waiting or self.running), "sequences wait and none can run"
        return self._output([self.requests[name].task(count) for name, count in step.chunks.items()], step.encode)

    def ahead(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """The step after `output`, while its tokens are not known: a row more for each sequence that may have one.

        None where something else is to be done first, or not all that run were in it up to their last token, except those
        that wait for encoder rows. What a sequence that ends with its unknown token computes is for nobody; it writes into
        blocks of its own.
        """
        sampled = {task.request_id for task in output.scheduled if task.sample}
        if self._new or self._updates or any(self._unclean) or self._someone_may_start():
            return None
        if not all(request.request_id in sampled or self.items.awaits(request) for request in self.running):
            return None
        mates = [request for request in sorted(self.running, key=_ORDER) if request.request_id in sampled]
        going = [request for request in mates if request.outlasts(self.limit)]
        if not going or not all(self.tables.grow(request, ahead=True) for request in going):
            return None
        self._steps_ahead += 1
        return self._output([ScheduledRequest(r.request_id, len(r.token_ids), 1, r.block_ids) for r in going])

    def _output(self, tasks: Sequence[ScheduledRequest], encode: Sequence[EncodeTask] = ()) -> SchedulerOutput:
        """With all that is to be said beside them, once."""
        output = SchedulerOutput(
            step=self._steps,
            scheduled=tuple(tasks),
            encode=tuple(encode),
            new_requests=tuple(self._new),
            updates=tuple(self._updates),
            finished=tuple(self._finished),
            free_encoder=self.encoder.take_dropped(),
            zero_blocks=tuple(map(tuple, self._unclean)) if any(self._unclean) else (),
        )
        self._steps += bool(tasks)
        self._new, self._updates, self._finished = [], [], []
        self._unclean = [[] for _ in self.kv.pools]
        return output

    def redeliver(self, output: SchedulerOutput) -> None:
        """What a step that broke off was to say beside its rows is said again with the next: saying it twice is harmless."""
        self._new = [*output.new_requests, *self._new]
        self._updates = [*output.updates, *self._updates]
        self._finished = [*output.finished, *self._finished]
        for blocks, again in zip(self._unclean, output.zero_blocks, strict=False):  # () where there were none
            blocks += again
        self.encoder.drop_again(output.free_encoder)

    def advance(self, scheduled: ScheduledRequest, token_ids: Sequence[int], whole: bool = False) -> Advance:
        """Book what a step did for one sequence; `whole`: it is all that was wanted."""
        request = self.requests[scheduled.request_id]
        request.num_computed += scheduled.num_tokens
        if scheduled.write_cross:
            self.tables.name_cross(request)
        self.tables.name(request)
        self.tables.trim(request)
        self.items.computed(request)
        if whole:
            self._end(request)
            return Advance("length", None)
        if not token_ids:
            return Advance()
        request.times.setdefault("first_token", time.perf_counter())
        request.token_ids += token_ids
        finish = request.finish_reason(self.limit)
        if finish is None:
            return self._check_loop(request)
        self._end(request)
        return Advance(*finish)

    @property
    def stats(self) -> EngineStats:
        states = [request.state for request in self.requests.values()]
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            idle=states.count(State.IDLE),
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            blocks=sum(pool.num_blocks for pool in self.kv.pools),
            blocks_used=sum(pool.num_blocks - pool.num_free for pool in self.kv.pools),
            blocks_kept=sum(pool.num_kept for pool in self.kv.pools),
            prefix_queries=self.tables.queries,
            prefix_hits=self.tables.hits,
            prefix_evictions=sum(pool.evictions for pool in self.kv.pools),
            encoder_hits=self.encoder.hits,
            encoder_evictions=self.encoder.evictions,
            encoder_bytes=self.encoder.bytes,
            encoder_capacity=self.encoder.capacity,
            preemptions=self._preemptions,
            cut_items=self._cut_items,
        )

    def _someone_may_start(self) -> bool:
        """A sequence waits, and there is a seat for it, or somebody less urgent in one."""
        if not self.waiting or len(self.running) < self.limits.max_num_seqs:
            return bool(self.waiting)
        return any(self.waiting[0].message.priority < request.message.priority for request in self.running)

    def _grow_running(self) -> None:
        """A block for the next token of every running sequence, or else for one fewer of them."""
        for request in list(self.running):
            while request.state is State.RUNNING:
                if self.tables.grow(request):
                    break
                self._evict(self._spare(request) or max(self.running, key=_ORDER))

    def _make_way(self) -> None:
        """Running sequences give way to a more urgent one (by priority, not by arrival) that waits."""
        while self.waiting and self.running:
            first, last = self.waiting[0], max(self.running, key=_ORDER)
            seat = len(self.running) < self.limits.max_num_seqs
            if last.message.priority <= first.message.priority or (seat and self._admit(first)):
                return
            self._evict(last)

    def _admit(self, request: Request) -> bool:
        """From waiting to running, with blocks for all known tokens; False for no room."""
        fresh = not any(request.block_ids)
        while not (self.tables.place(request, self._atoms(request)) if fresh else self.tables.grow(request)):
            victim = self._spare(request)
            if victim is None:
                return False
            self._evict(victim)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        request.times.setdefault("scheduled", time.perf_counter())
        return True

    def _spare(self, keep: Request) -> Request | None:
        """A sequence that holds blocks and does not run: an idle one, else the last of the waiting ones."""
        idle = (request for request in self.requests.values() if request.state is State.IDLE)
        spare = (request for request in (*idle, *reversed(self.waiting)) if request is not keep and any(request.block_ids))
        return next(spare, None)

    def _evict(self, request: Request) -> None:
        """Others need its blocks."""
        request.preemptions += 1
        self._preemptions += 1
        self._take_blocks(request)

    def _take_blocks(self, request: Request) -> None:
        """What the prefix cache still has of them when the sequence runs next is not computed again."""
        self.tables.drop(request)
        self.items.unread(request)
        request.epoch += 1
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._wake(request)

    def _wake(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=_ORDER)

    def _take(self, request: Request, step: _Step) -> None:
        """Rows for one running sequence, as many as budgets, atoms and encoder rows allow."""
        start, parts = request.num_computed, self._atoms(request)
        count = clip(start, min(request.remaining, step.budget), step.budget, parts)
        readable, tasks = self.items.read(request, count, step.encoder_budget, first=not step.encode)
        count = clip(start, readable, readable, parts)
        if count == 0:
            keep = not step.waits and self.items.awaits(request)
            step.waits |= keep
            tasks = self.items.stand(request, tasks, keep)
        step.encode += tasks
        step.encoder_budget -= sum(request.item(task.index).range.num_embeds for task in tasks)
        if count == 0:
            return
        step.chunks[request.request_id] = count
        step.budget -= count
        stop = start + count
        self._cut_items += any(f.range.offset < stop < f.range.end for f in request.features[request.next_feature :])

    def _atoms(self, request: Request) -> Sequence[Atom]:
        return atoms(self.limits.prefill, request.prompt_length, request.features)

    def _check_loop(self, request: Request) -> Advance:
        """An answer that goes round in a circle ends, or is rolled back to where that began and may not go there again."""
        detection = request.message.params.repetition_detection
        loop = None if detection is None else find_loop(request.token_ids, request.turn_start, detection)
        if detection is None or loop is None:
            return Advance()
        if not detection.repair or request.repairs >= detection.max_repairs:
            self._end(request)
            return Advance("repetition")
        removed = len(request.token_ids) - loop.start
        request.repairs += 1
        self.truncate(request.request_id, loop.start, forbid=(loop.forbidden,))
        return Advance(num_removed=removed)

    def _end(self, request: Request) -> None:
        if request.hold_open:
            self.running.remove(request)
            request.state = State.IDLE
        else:
            self.abort(request.request_id)

    def _live(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise InputError(f"request {request_id!r} is not being served")
        return self.requests[request_id]

    def _check(self, request: Request) -> None:
        check_length(len(request.token_ids), self.limit)
        room = self.limits.max_num_batched_tokens - self.limits.max_num_seqs + 1  # a row for each of the others
        rows = self.encoder.capacity // max(1, self.encoder.row_bytes)
        check_atoms(self._atoms(request), request.features, request.cross_rows, room, rows)
