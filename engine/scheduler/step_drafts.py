"""Decides which sequences of a step get guesses of their next tokens, and how many fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..drafts.drafter import Drafter
from ..kv_cache.block_tables import BlockTables
from ..stats import DraftStats
from ..types import SchedulerOutput, StepOutput
from .limits import SchedulerLimits
from .request import Request

Propose = Callable[[Request, int], Sequence[int]]
"""Returns guesses of the next tokens of a sequence, at most as many as the second argument."""


class StepDrafts:
    """The drafted tokens of a scheduler's steps, which verify several tokens of a sequence at once.

    Args:
        max_length: tokens of the longest sequence.
        drafter: guesses the next tokens of sequences; None guesses nothing.
    """

    def __init__(
        self, block_tables: BlockTables, limits: SchedulerLimits, max_length: int, drafter: Drafter | None = None
    ) -> None:
        self._block_tables, self._limits, self._max_length, self.drafter = block_tables, limits, max_length, drafter
        self.propose: Propose | None = None  # if not None, it drafts in place of the drafter
        self.has_proposers = False  # whether a running sequence had proposers when a step was planned last
        self.has_drafts = False  # whether a sequence of the step that is being scheduled may have drafts
        self.reason = "off"  # why there is no drafter, as `EngineStats.no_drafts`

    def _may_draft(self, request: Request) -> bool:
        """Return whether a step may guess tokens of a running sequence: not of a prompt's rest, and not if it only pools."""
        has_states = self._block_tables.has_states
        decodes = request.remaining == 1 or (has_states and request.num_computed >= request.turn_start)
        return decodes and self._can_answer(request)

    @staticmethod
    def _can_answer(request: Request) -> bool:
        return request.may_draft and request.message.pooling is None

    def may_propose(self, request: Request) -> bool:
        """Return whether a sequence that decodes may get guesses."""
        return self.drafter is not None and self.drafter.drafts_for(request) and self._may_draft(request)

    def plan(self, running: Sequence[Request]) -> None:
        """Draft for the running sequences that decode."""
        self.has_drafts = self.propose is not None
        self.has_proposers = self.drafter is not None and any(map(self.drafter.drafts_for, running))
        if self.drafter is None or not self.has_proposers:
            return
        decoding = [request for request in running if self._may_draft(request)]
        if decoding:
            rows = min(sum(request.remaining for request in running), self._limits.max_num_batched_tokens)
            self.has_drafts |= self.drafter.plan(decoding, rows)

    def take(self, request: Request, budget: int) -> tuple[int, ...]:
        """Return guesses of a sequence's next tokens, as many as the step, its blocks and the rest of its answer have room for.

        `budget`: rows of the step that this sequence may take.
        """
        if not (self._plan_prompt(request, budget) or (self.has_drafts and self._may_draft(request))):
            return ()
        propose = self.propose
        if propose is None:
            assert self.drafter is not None
            propose = self.drafter.take
        room = min(budget, self._limits.max_chunk) - request.remaining
        room = min(room, request.room(self._max_length) - 1, self._block_tables.room_to_state(request))
        drafts = tuple(propose(request, room))[:room] if room > 0 else ()
        return drafts if drafts and self._block_tables.grow(request, len(drafts)) else ()

    def _plan_prompt(self, request: Request, budget: int) -> bool:
        """Draft for a sequence if the step computes the rest of its prompt. Return whether there are guesses.

        They ride with the prompt's last rows. With states, a wrong guess would let the next step compute these again.
        """
        is_last = request.remaining <= min(budget, self._limits.max_chunk) and request.num_computed < request.turn_start
        if self.drafter is None or not is_last or self._block_tables.has_states or not self._can_answer(request):
            return False
        has_drafts = self.drafter.plan_prompt(request, request.remaining)
        self.has_proposers |= has_drafts
        return has_drafts

    def predicts(self, request: Request) -> bool:
        """Return False once what the worker predicts for a sequence is not proposed any more."""
        return self.drafter is None or not self.drafter.limits.predicted or self.drafter.predicts(request)

    def start_step(self, output: SchedulerOutput) -> None:
        """Note that a step begins."""
        if self.drafter is not None:
            rows = sum([task.num_tokens for task in output.scheduled])
            decodes = not output.encode and rows == sum([task.num_sampled for task in output.scheduled])
            self.drafter.start_step(rows * decodes)

    def end_step(self, done: StepOutput) -> None:
        """Record how long the step and its predictions took."""
        if self.drafter is not None:
            self.drafter.end_step(done.predict_seconds, len([result for result in done.tokens if result.predicted]))

    def settle(self, request: Request, num_verified: int) -> None:
        """Learn from the tokens that a step has added; only for `has_proposers`. `num_verified`: guesses that were its rows."""
        if self.drafter is not None:
            self.drafter.settle(request, num_verified)

    def end_answer(self, request: Request) -> None:
        """Keep a finished answer for later ones."""
        if self.drafter is not None:
            self.drafter.end_answer(request)

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        """Statistics of each proposer, over all requests."""
        return () if self.drafter is None else self.drafter.stats

    @property
    def no_drafts(self) -> str:
        """Why no sequence gets drafts, as in EngineStats."""
        return "" if self.drafter is not None else self.reason
