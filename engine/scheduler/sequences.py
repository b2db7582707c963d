"""Begins, changes and ends sequences: what callers ask of a scheduler between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...callers.errors import InputError
from ...mm.types import MultiModalFeature
from ..bidirectional_spans import BidirectionalSpan
from ..kv_cache.block_tables import BlockTables
from ..types import EngineRequest, RequestUpdate, TokenOutput
from .encoder_inputs import EncoderInputs
from .limits import SchedulerLimits, check_cross, check_cross_items, check_features, check_length, check_spans
from .policy import SchedulingPolicy
from .request import Request, State
from .request_queues import RequestQueues
from .step_drafts import StepDrafts
from .worker_messages import WorkerMessages


class Sequences:
    """The sequences of a scheduler, with the queues in which they wait or run and the messages that tell workers of them.

    Args:
        max_length: tokens of the longest sequence.
    """

    def __init__(
        self,
        block_tables: BlockTables,
        encoder_inputs: EncoderInputs,
        limits: SchedulerLimits,
        max_length: int,
        policy: SchedulingPolicy,
        drafts: StepDrafts,
    ) -> None:
        self._block_tables, self._encoder_inputs, self._limits = block_tables, encoder_inputs, limits
        self._max_length, self._drafts, self._arrivals = max_length, drafts, 0
        self.queues = RequestQueues(block_tables, encoder_inputs, limits, policy)
        self.messages = WorkerMessages()

    def __len__(self) -> int:
        """Return the number of sequences, those that are held open included."""
        return len(self.queues.requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.queues.requests

    def check_items(self, features: Sequence[MultiModalFeature]) -> None:
        """Raise MediaError if one of the items is in quarantine."""
        self._encoder_inputs.quarantine.check_items(features)

    def add(self, message: EngineRequest) -> None:
        """Queue a sequence. Raise InputError, and change nothing, for a prompt that could never run."""
        if message.request_id in self.queues.requests:
            raise InputError(f"request {message.request_id!r} is already being served")
        check_features(message.features, 0, len(message.prompt_token_ids))
        pools = self._block_tables.block_pools
        request = Request(message, self._arrivals, pools.empty)
        has_cross_attention = any(spec.kind == "cross" for spec in pools.specs)
        optional = any(spec.optional for spec in pools.specs)
        check_cross(request.cross_rows, pools.cross_capacity, has_cross_attention, optional)
        self._check(request)
        self._renew_spans(request, ())
        self._encoder_inputs.register(request, request.items())
        self._arrivals += 1
        self.queues.begin_epoch(request)
        self.queues.requests[message.request_id] = request
        self.messages.send(new_requests=(message,))
        self.queues.enqueue(request)

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
        spans = request.spans(self._limits.prompt_attention)
        request.append(token_ids, features)
        try:
            self._check(request)
            self._encoder_inputs.register(request, list(enumerate(request.features))[num_items:])
        except InputError:
            del request.features[num_items:], request.token_ids[length:]
            request.turn_start = turn
            raise
        request.repairs = 0
        self.queues.begin_epoch(request)
        update = RequestUpdate(request.request_id, length, tuple(token_ids), tuple(features), restart=True, adapter=adapter)
        self.messages.send(updates=(update,))
        has_new_adapter = adapter is not None and request.set_adapter(adapter)
        windowed = self._block_tables.answer_window is not None  # the answer becomes a part of the prompt
        if self._renew_spans(request, spans) or has_new_adapter or windowed:
            self.queues.free_blocks(request)
        if request.state is State.IDLE:  # it keeps its blocks while it waits, unless another sequence needs them
            self.queues.enqueue(request)
        else:
            self.queues.reorder(request)

    def truncate(self, request_id: str, num_tokens: int, forbid: tuple[tuple[int, ...], ...] = ()) -> None:
        """Roll a sequence back to its first `num_tokens` tokens. Computed blocks of these tokens are kept where possible."""
        request = self._get_live(request_id)
        dropped = [(f.hash, request.item_user(i)) for i, f in enumerate(request.features) if f.range.offset >= num_tokens]
        spans = request.spans(self._limits.prompt_attention)
        request.truncate(num_tokens, self._block_tables.block_pools.block_size)
        self.queues.begin_epoch(request)
        if self._renew_spans(request, spans):
            request.rewind(0)  # the remaining tokens attended to the removed ones
        if self._block_tables.answer_window is not None:  # keys of removed tokens may be in the places of remaining ones
            request.rewind(min(request.num_computed, request.turn_start))
        for key, user in dropped:
            self._encoder_inputs.cache.unregister(key, user)
        self._block_tables.roll_back(request, request.spans(self._limits.prompt_attention))
        self.messages.send(updates=(RequestUpdate(request_id, num_tokens, forbid=forbid),))
        self.queues.reorder(request)

    def restart_answer(self, request_id: str) -> int:
        """Remove the tokens of the answer that a sequence is generating. Return how many these were; 0 for an unknown one."""
        request = self.queues.requests.get(request_id)
        count = 0 if request is None else request.num_generated
        if request is not None and count:
            self.truncate(request_id, request.turn_start)
        return count

    def pause(self, request_id: str) -> TokenOutput:
        """End the current answer of a sequence that is held open. Return its timings and statistics."""
        request = self._get_live(request_id)
        if request.state is State.WAITING:  # it was preempted
            self.queues.waiting.remove(request)
            request.state = State.IDLE
        elif request.state is State.LOADING:
            request.state = State.IDLE
        elif request.state is State.RUNNING:
            self._end_answer(request)
        return request.final_output(TokenOutput(request_id, ()))

    def abort(self, request_id: str) -> TokenOutput | None:
        """Free everything a sequence holds. Return its timings and statistics, or None if it is unknown."""
        request = self.queues.requests.pop(request_id, None)
        if request is None:
            return None
        if request.state is State.RUNNING:
            self.queues.running.remove(request)
        elif request.state is State.WAITING:
            self.queues.waiting.remove(request)
        request.state = State.IDLE
        self._drafts.end_answer(request)
        self._encoder_inputs.unregister(request)
        self._block_tables.free(request)
        self.messages.end(request_id)
        return request.final_output(TokenOutput(request_id, ()))

    def fail(self, output: TokenOutput, zero_blocks: bool = False) -> TokenOutput:
        """End a sequence with the error in `output` and return its last output.

        `zero_blocks`: zero its blocks, which may hold NaN, except those that earlier steps have completed.
        """
        request = self.queues.requests[output.request_id]
        if zero_blocks:
            self.messages.send(zero_blocks=self._block_tables.unhashed_blocks(request))
        self.abort(output.request_id)
        return request.final_output(replace(output, finish_reason="error"))

    def _renew_spans(self, request: Request, before: Sequence[BidirectionalSpan]) -> bool:
        """Update what depends on a sequence's spans, which were `before`. Return True if computed tokens are stale."""
        spans = request.spans(self._limits.prompt_attention)
        if self._limits.prompt_attention.key_order is not None:  # whole prompts whose items see each other
            request.bind_hashes(spans[0][1] if spans and spans[0][0] == 0 else 0)
        return any(first < request.num_computed for first, _ in {*before} ^ {*spans})

    def finish(self, request: Request, output: TokenOutput, reason: str, stop_token: int | None = None) -> TokenOutput:
        """End the answer of a running sequence, whose last output this is. Return it with its reason and statistics."""
        self._end_answer(request)
        return request.final_output(replace(output, finish_reason=reason, stop_reason=stop_token))

    def _end_answer(self, request: Request) -> None:
        if request.hold_open:
            self.queues.running.remove(request)
            request.state = State.IDLE
            self._drafts.end_answer(request)
        else:
            self.abort(request.request_id)

    def _get_live(self, request_id: str) -> Request:
        if request_id not in self.queues.requests:
            raise InputError(f"request {request_id!r} is not being served")
        return self.queues.requests[request_id]

    def _check(self, request: Request) -> None:
        check_length(len(request.token_ids), self._max_length, answer=int(request.message.pooling is None))
        max_tokens = self._limits.max_num_batched_tokens - self._limits.max_num_seqs + 1  # a token for each of the others
        cache = self._encoder_inputs.cache
        max_rows = cache.capacity // max(1, cache.row_bytes)
        check_cross_items(request.message.cross, self._limits.max_cross_rows, max_rows)
        check_spans(request.spans(self._limits.prompt_attention), request.features, request.cross_rows, max_tokens, max_rows)
