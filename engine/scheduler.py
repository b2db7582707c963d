"""Which sequences compute how many tokens in the next step, in which blocks. Knows no tensor and no model."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .encoder_cache import EncoderCache
from .kv import KVBlocks
from .request import Request, State, check_features
from .types import EncodeTask, EngineRequest, RequestUpdate, ScheduledRequest, SchedulerOutput


class Scheduler:
    """Continuous batching with chunked prefill.

    Rows of a step go to sequences with one token to compute first, then to started prompts, then to waiting ones, as
    far as the token budget reaches; a prompt may be cut anywhere. A sequence is admitted when the pool has blocks for
    all its known tokens. When an answer finds no block to grow into, idle sequences lose theirs first, then the
    running one with the largest (priority, arrival); what was lost is computed again later, and its items encoded again.
    """

    def __init__(self, kv: KVBlocks, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self.kv = kv
        self.encoder = EncoderCache()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.limit = min(max_model_len, kv.capacity)  # tokens of the longest sequence
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by order
        self.running: list[Request] = []
        self._arrivals = self._step = 0
        self._new: list[EngineRequest] = []
        self._updates: list[RequestUpdate] = []
        self._finished: list[str] = []

    def add(self, message: EngineRequest) -> None:
        """InputError for a prompt that could never run; then nothing is changed."""
        if message.request_id in self.requests:
            raise InputError(f"request {message.request_id!r} is already being served")
        self._check_length(len(message.prompt_token_ids))
        check_features(message.features, 0, len(message.prompt_token_ids))
        request = Request.new(message, self._arrivals, self.kv.empty)
        self._acquire(request, request.open_features)
        self._arrivals += 1
        self.requests[message.request_id] = request
        self._new.append(message)
        insort(self.waiting, request, key=_order)

    def append(self, request_id: str, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> None:
        request = self._live(request_id)
        self._check_length(len(request.token_ids) + len(token_ids))
        known, length = len(request.features), len(request.token_ids)
        request.append(token_ids, features)
        try:
            self._acquire(request, range(known, len(request.features)))
        except InputError:
            del request.features[known:], request.token_ids[length:]
            request.turn_start = length
            raise
        self._updates.append(RequestUpdate(request_id, length, tuple(token_ids), tuple(features), restart=True))
        if request.state is State.IDLE:  # it keeps its blocks while it waits, unless another needs them
            self._wake(request)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        request = self._live(request_id)
        dropped = [(f.hash, request.user(i)) for i, f in enumerate(request.features) if f.range.offset >= num_tokens]
        request.truncate(num_tokens)
        for key, user in dropped:
            self.encoder.release(key, user)
        self._reacquire(request)
        request.block_ids = self.kv.shrink(request.block_ids, num_tokens)
        self._updates.append(RequestUpdate(request_id, num_tokens))

    def abort(self, request_id: str) -> bool:
        """Free everything a sequence holds; False if there is none of that name."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        self._release(request, request.open_features)
        request.block_ids = self.kv.shrink(request.block_ids, 0)
        self._new = [message for message in self._new if message.request_id != request_id]
        self._updates = [update for update in self._updates if update.request_id != request_id]
        self._finished.append(request_id)
        return True

    def schedule(self) -> SchedulerOutput:
        """The next step. Computed counts advance in `advance`, once it has run."""
        chunks: dict[str, int] = {}
        budget, preempted = self._schedule_running(chunks)
        if not preempted:
            self._schedule_waiting(chunks, budget)
        assert chunks or not (self.waiting or self.running), "sequences wait and none can run"
        encode = [task for request_id, count in chunks.items() for task in self._encode_tasks(request_id, count)]
        scheduled = tuple(_scheduled(self.requests[request_id], count) for request_id, count in chunks.items())
        output = SchedulerOutput(
            step=self._step,
            scheduled=scheduled,
            encode=tuple(encode),
            new_requests=tuple(self._new),
            updates=tuple(self._updates),
            finished=tuple(self._finished),
            free_encoder=self.encoder.take_freed(),
        )
        self._step += 1
        self._new, self._updates, self._finished = [], [], []
        return output

    def redeliver(self, output: SchedulerOutput) -> None:
        """What a step that broke off was to free is said again with the next; freeing twice is harmless."""
        self._finished = [*output.finished, *self._finished]
        self.encoder.refree(output.free_encoder)

    def advance(self, scheduled: ScheduledRequest, token_ids: Sequence[int]) -> tuple[str, int | None] | None:
        """Book what a step did for one sequence; (finish reason, stop token) when its answer is complete."""
        request = self.requests[scheduled.request_id]
        request.num_computed += scheduled.num_tokens
        self._release_computed(request)
        if not token_ids:
            return None
        request.times.setdefault("first_token", time.perf_counter())
        request.token_ids += token_ids
        finish = request.finish_reason(self.limit)
        if finish is not None and request.message.hold_open:
            self.running.remove(request)
            request.state = State.IDLE
        elif finish is not None:
            self.abort(request.request_id)
        return finish

    def _schedule_running(self, chunks: dict[str, int]) -> tuple[int, bool]:
        budget, preempted = self.max_num_batched_tokens, False
        for request in sorted(self.running, key=_is_chunked):
            if budget == 0 or request.state is not State.RUNNING:  # taken from by an earlier one of this loop
                continue
            while (blocks := self.kv.grow(request.block_ids, len(request.token_ids))) is None:
                victim = self._spare(request) or max(self.running, key=_order)
                budget += chunks.pop(victim.request_id, 0)
                preempted = preempted or victim.state is State.RUNNING
                self._evict(victim)
                if victim is request:
                    break
            else:
                request.block_ids = blocks
                budget -= chunks.setdefault(request.request_id, min(request.remaining, budget))
        return budget, preempted

    def _schedule_waiting(self, chunks: dict[str, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            while (blocks := self.kv.grow(request.block_ids, len(request.token_ids))) is None:
                victim = self._spare(request)
                if victim is None:
                    return
                self._evict(victim)
            self.waiting.pop(0)
            self.running.append(request)
            request.state, request.block_ids = State.RUNNING, blocks
            request.times.setdefault("scheduled", time.perf_counter())
            chunks[request.request_id] = min(request.remaining, budget)
            budget -= chunks[request.request_id]

    def _spare(self, keep: Request) -> Request | None:
        """A sequence that holds blocks and does not run: an idle one, else the last of the waiting ones."""
        idle = (request for request in self.requests.values() if request.state is State.IDLE)
        spare = (request for request in (*idle, *reversed(self.waiting)) if request is not keep and any(request.block_ids))
        return next(spare, None)

    def _evict(self, request: Request) -> None:
        """Take a sequence's blocks; its tokens are computed again when it runs next."""
        request.block_ids = self.kv.shrink(request.block_ids, 0)
        request.num_computed = 0
        self._reacquire(request)
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._wake(request)

    def _wake(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=_order)

    def _encode_tasks(self, request_id: str, count: int) -> list[EncodeTask]:
        request, tasks = self.requests[request_id], []
        stop = request.num_computed + count
        for index in request.open_features:
            feature = request.features[index]
            if feature.range.offset >= stop:
                break
            if feature.hash not in self.encoder:
                self.encoder.mark_encoded(feature.hash)
                tasks.append(EncodeTask(request_id, index, feature.hash))
        return tasks

    def _acquire(self, request: Request, indices: range) -> None:
        try:
            for index in indices:
                feature = request.features[index]
                self.encoder.acquire(feature.hash, feature.range.num_embeds, request.user(index))
        except InputError:
            self._release(request, indices)
            raise

    def _reacquire(self, request: Request) -> None:
        """After computed tokens were lost: the items among them, and behind, are wanted again."""
        ends = [feature.range.end for feature in request.features]
        request.next_feature = sum(end <= request.num_computed for end in ends)
        self._acquire(request, request.open_features)

    def _release(self, request: Request, indices: range) -> None:
        for index in indices:
            self.encoder.release(request.features[index].hash, request.user(index))

    def _release_computed(self, request: Request) -> None:
        features = request.features
        while request.next_feature < len(features) and features[request.next_feature].range.end <= request.num_computed:
            self.encoder.release(features[request.next_feature].hash, request.user(request.next_feature))
            request.next_feature += 1

    def _live(self, request_id: str) -> Request:
        if request_id not in self.requests:
            raise InputError(f"request {request_id!r} is not being served")
        return self.requests[request_id]

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise InputError("the prompt has no tokens; give at least one")
        if length >= self.limit:
            raise InputError(f"prompt has {length} tokens, max_model_len is {self.limit}: shorten it or raise max_model_len")


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _is_chunked(request: Request) -> bool:
    return request.remaining > 1


def _scheduled(request: Request, count: int) -> ScheduledRequest:
    return ScheduledRequest(request.request_id, request.num_computed, count, request.block_ids, count == request.remaining)
