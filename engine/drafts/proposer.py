"""The interface of proposers, which guess the next tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..types import EngineRequest


class DraftedSequence(Protocol):
    """The part of a sequence that proposers read. `scheduler.request.Request` implements it."""

    message: EngineRequest
    token_ids: list[int]  # prompt and answer so far; a rollback may shorten it
    turn_start: int  # tokens before the answer that is being generated
    predicted: tuple[int, tuple[int, ...]]  # length of the sequence, and what the worker expects after it


class Proposer(Protocol):
    """Guesses the next tokens of one sequence.

    It runs in the engine's loop before every step, so it must take microseconds. It never changes an answer: the sampler
    compares each guess with the token that it samples anyway. A proposer that raises is dropped for its sequence.

    Attributes:
        name: stands in statistics and metrics.
        matched: how many tokens before the last guesses agree with their source; acceptance is estimated by this number.
    """

    name: str
    matched: int

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        """Return guesses of the tokens after `sequence.token_ids`, at most `budget`; none if there is no good guess."""


MakeProposer = Callable[[EngineRequest], Proposer | None]
"""Makes the proposer of a sequence. None: it has nothing to propose for this request."""


def match_length(source: Sequence[int], end_in_source: int, token_ids: Sequence[int], longest: int) -> int:
    """Return how many tokens before `end_in_source` in `source` equal the last ones of `token_ids`, at most `longest`."""
    end, length = len(token_ids), 0
    limit = min(longest, end_in_source, end)
    while length < limit and source[end_in_source - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length
