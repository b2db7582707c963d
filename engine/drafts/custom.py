"""Proposers of callers: found by their path, and shielded, so that nothing they do wrong touches an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from pkgutil import resolve_name
from typing import Any, Protocol

from ..sampling_params import SamplingParams
from ..speculative_config import config_error
from ..types import EngineRequest
from .proposer import DraftedSequence, MakeProposer


@dataclass(frozen=True)
class SequenceView:
    """A copy of a sequence, which a caller's proposer reads.

    Args:
        request_id: name of the sequence; answers of one request with n above 1 are sequences of their own.
        token_ids: prompt and answer so far; a rollback may have shortened it since the last call.
        turn_start: number of tokens before the answer that is being generated.
        params: of the request.
    """

    request_id: str
    token_ids: list[int]
    turn_start: int
    params: SamplingParams


class CustomProposer(Protocol):
    """A proposer of a caller; one is made per sequence.

    It may have an attribute `name` for statistics, and `matched`, the number of tokens before the last guesses that agree with
    their source: acceptance is estimated by this number.
    """

    def propose(self, sequence: SequenceView, budget: int) -> Iterable[int]:
        """Return guesses of the tokens after `sequence.token_ids`, at most `budget`; none if there is no good guess."""


class ShieldedProposer:
    """A caller's proposer as a `Proposer`: it gets copies, and only integers come back.

    Args:
        proposer: see CustomProposer.
    """

    def __init__(self, proposer: CustomProposer) -> None:
        self._proposer, self.matched = proposer, 0
        name = getattr(proposer, "name", None)
        self.name = name if isinstance(name, str) and name else type(proposer).__name__

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        message = sequence.message
        view = SequenceView(message.request_id, list(sequence.token_ids), sequence.turn_start, message.params)
        try:
            guesses = [index(token) for token in islice(self._proposer.propose(view, budget), budget)]
            self.matched = index(getattr(self._proposer, "matched", 0))
        except SystemExit as error:  # must not end the process
            raise RuntimeError(f"a proposer raised SystemExit ({error}); it must return") from error
        return guesses


def make_custom(path: str) -> MakeProposer:
    """Return what makes the proposers of a class or function with this path, "module:name" or "module.name".

    Raises:
        ConfigError: it cannot be imported, or cannot be called.
    """
    try:
        factory: Callable[[], Any] = resolve_name(path)
    except (Exception, SystemExit) as error:  # raised by the caller's module
        reason = f"cannot be imported: {type(error).__name__}: {error}; give the path of a class, such as package.module:Name"
        raise config_error(path, reason, "model") from None
    if not callable(factory):
        raise config_error(path, "is not a class or a function that makes a proposer", "model")

    def make(message: EngineRequest) -> ShieldedProposer:
        try:
            return ShieldedProposer(factory())
        except SystemExit as error:
            raise RuntimeError(f"a proposer's class raised SystemExit ({error})") from error

    return make
