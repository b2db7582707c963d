"""The running and the waiting sequences: which one is admitted next, and which one loses its blocks for another."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from itertools import count

from ..kv_cache.block_tables import BlockTables
from .encoder_inputs import EncoderInputs
from .limits import SchedulerLimits
from .policy import Order, SchedulingPolicy
from .request import Request, State


class RequestQueues:
    """The sequences of a scheduler.

    A sequence is admitted if the pools have blocks for all its tokens except shared prefixes. When blocks run out, the policy
    says which sequence loses them.
    """

    def __init__(
        self, block_tables: BlockTables, encoder_inputs: EncoderInputs, limits: SchedulerLimits, policy: SchedulingPolicy
    ) -> None:
        self._block_tables, self._encoder_inputs, self._limits, self.policy = block_tables, encoder_inputs, limits, policy
        self.requests: dict[str, Request] = {}  # those that are held open included
        self.waiting: list[Request] = []  # in the policy's order
        self.running: list[Request] = []
        self.preemptions = 0
        self._epochs = count()

    def can_start_another(self) -> bool:
        """Return whether the batch has a place for the first waiting sequence, or a sequence of lower priority."""
        if not self.waiting or len(self.running) < self._limits.max_num_seqs:
            return bool(self.waiting)
        return any(self.policy.preempts(self.waiting[0], request) for request in self.running)

    def in_step_order(self) -> list[Request]:
        """Return the running sequences in the order of a step: those with one token to compute come first."""
        return sorted(self.running, key=self._step_order)

    def _step_order(self, request: Request) -> tuple[bool, Order]:
        return request.remaining > 1, self.policy.order(request)

    def grow_running(self) -> None:
        """Allocate a block for each running sequence that needs one for its next token; preempt if there is none."""
        for request in list(self.running):
            while request.state is State.RUNNING:
                if self._block_tables.grow(request):
                    break
                victim = self._pick_victim(request, self.running)
                assert victim is not None
                self.preempt(victim)

    def preempt_for_priority(self) -> None:
        """Preempt running sequences while one with a more urgent priority waits and cannot be admitted."""
        while self.waiting and self.running:
            first, last = self.waiting[0], max(self.running, key=self.policy.order)
            has_place = len(self.running) < self._limits.max_num_seqs
            if not self.policy.preempts(first, last) or (has_place and self.try_admit(first)):
                return
            self.preempt(last)

    def try_admit(self, request: Request) -> bool:
        """Allocate blocks for all tokens of a waiting sequence and run it. Return False if there are too few blocks."""
        has_blocks, tables, attention = any(request.block_ids), self._block_tables, self._limits.prompt_attention
        while not (tables.grow(request) if has_blocks else tables.allocate(request, request.spans(attention))):
            victim = self._pick_victim(request)
            if victim is None:
                return False
            self.preempt(victim)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
        self.waiting.remove(request)
        self.running.append(request)
        request.state = State.RUNNING
        request.times.setdefault("scheduled", time.perf_counter())
        return True

    def _pick_victim(self, keep: Request, running: Sequence[Request] = ()) -> Request | None:
        """Return a sequence that loses its blocks for `keep`: one that does not run, or one of `running`."""
        idle = [request for request in self.requests.values() if request.state is State.IDLE and any(request.block_ids)]
        waiting = [request for request in self.waiting if request is not keep and any(request.block_ids)]
        return self.policy.victim(idle, waiting, running)

    def preempt(self, request: Request) -> None:
        """Free the blocks of a sequence for another one, and let it wait."""
        request.preemptions += 1
        self.preemptions += 1
        self.free_blocks(request)

    def free_blocks(self, request: Request) -> None:
        """Free a sequence's blocks. It will be computed again, except for what the prefix cache still has."""
        self._block_tables.free(request)
        self._encoder_inputs.unpin(request)
        self._encoder_inputs.discard_chunks(request)  # the encoder's state is that of the last chunk: it begins again, too
        self.begin_epoch(request)
        if request.state is State.RUNNING:
            self.running.remove(request)
            self.enqueue(request)
        else:
            self.reorder(request)

    def begin_epoch(self, request: Request) -> None:
        """Make the results of a sequence that are in flight stale."""
        request.epoch = next(self._epochs)

    def enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=self.policy.order)

    def reorder(self, request: Request) -> None:
        """Move a waiting sequence whose tokens have changed to its place."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
            self.enqueue(request)
