"""Drafts tokens for the sequences of a step: asks their proposers, chooses the depths, and learns from what was sampled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from ..speculative_config import DraftLimits
from ..stats import DraftStats
from ..types import EngineRequest
from .corpus import Corpus, CorpusProposer
from .depth import AcceptanceRates, Slot, StepCosts, choose_depth, choose_depths
from .draft_text import DraftTextProposer
from .predicted import PredictedProposer
from .proposer import DraftedSequence, MakeProposer, Proposer
from .suffix import SuffixProposer

_WEIGHT = 0.2  # of a new measurement in the running mean of a prediction's seconds
_TRIALS = 8  # drafts of a request after which a proposer that does not pay is switched off
_log = logging.getLogger(__name__)


@dataclass
class _Count:
    """Statistics of a proposer."""

    drafts: int = 0
    drafted: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    switched_off: int = 0
    failed: int = 0

    def add(self, depth: int, accepted: int) -> None:
        self.drafts += 1
        for counts, count in (self.drafted, depth), (self.accepted, accepted):
            counts.extend([0] * (depth - len(counts)))
            for position in range(count):
                counts[position] += 1

    def stats(self, name: str) -> DraftStats:
        return DraftStats(name, self.drafts, tuple(self.drafted), tuple(self.accepted), self.switched_off, self.failed)


@dataclass
class _Proposal:
    """Guessed tokens that a proposer puts after the first `length` tokens."""

    proposer: Proposer
    tokens: Sequence[int]
    matched: int


class SequenceDrafts:
    """The proposers of one sequence, its acceptance rates and its counts."""

    def __init__(self, proposers: Iterable[Proposer], rates: AcceptanceRates) -> None:
        self.proposers, self.rates = list(proposers), AcceptanceRates(rates)
        self.counts: dict[str, _Count] = {}
        self.proposals: list[_Proposal] = []  # for the next step
        self.length = 0  # of the sequence when they were made
        self.turn_start = 0  # of the answer that the counts are about
        self.chosen: _Proposal | None = None
        self.depth = 0
        self.predictions = 0  # that were compared with what was sampled

    def count(self, name: str) -> _Count:
        return self.counts.setdefault(name, _Count())

    def stats(self) -> tuple[DraftStats, ...]:
        return tuple(count.stats(name) for name, count in self.counts.items())


class Drafted(DraftedSequence, Protocol):
    """A sequence that keeps its drafts."""

    drafts: SequenceDrafts | None


class Drafter:
    """Drafts for the sequences of one scheduler. Nothing here changes an answer, see `Proposer`.

    Args:
        limits: see DraftLimits.
        costs: costs of steps.
        vocab_size: guesses that are no token below it end a draft.
        proposers: make more proposers of each sequence.
        now: returns seconds.
        has_states: see `Slot.repeats`.
    """

    def __init__(
        self,
        limits: DraftLimits,
        costs: StepCosts,
        vocab_size: int,
        proposers: Sequence[MakeProposer] = (),
        now: Callable[[], float] = time.perf_counter,
        has_states: bool = False,
    ) -> None:
        self.limits, self.costs, self._vocab_size, self._more, self._now = limits, costs, vocab_size, proposers, now
        self.rates, self._counts, self._has_states = AcceptanceRates(), dict[str, _Count](), has_states
        has_corpus = limits.corpus_bytes > 0 and limits.corpus_answers > 0
        self.corpus = Corpus(limits.corpus_bytes, limits.corpus_answers) if has_corpus else None
        self._rows, self._started = 0, 0.0
        self._predict_seconds, self._num_sequences = 0.0, 1  # of a prediction for one sequence; sequences of the last step

    def drafts_for(self, sequence: Drafted) -> bool:
        """Return whether a sequence has proposers. Those of a new one are made."""
        drafts = sequence.drafts
        if drafts is None:
            drafts = sequence.drafts = SequenceDrafts(self._make(sequence.message), self.rates)
        elif drafts.turn_start != sequence.turn_start:  # its draft_text was for the first answer
            drafts.proposers = [proposer for proposer in drafts.proposers if not isinstance(proposer, DraftTextProposer)]
            drafts.counts = {}
        drafts.turn_start = sequence.turn_start
        return bool(drafts.proposers)

    def predicts(self, sequence: Drafted) -> bool:
        """Return False once the worker's predictions for a sequence are no longer proposed. Only for `limits.predicted` > 0."""
        drafts = sequence.drafts
        return drafts is None or any(isinstance(proposer, PredictedProposer) for proposer in drafts.proposers)

    def _make(self, message: EngineRequest) -> Iterable[Proposer]:
        limits, draft = self.limits, message.draft_token_ids
        if draft:
            yield DraftTextProposer("hypothesis" if isinstance(message.params.draft_text, tuple) else "text", draft)
        if limits.predicted:
            yield PredictedProposer(limits.method)
        if limits.suffix:
            yield SuffixProposer(limits.shortest, limits.longest)
        if self.corpus is not None:
            yield CorpusProposer(self.corpus, _key(message))
        for make in self._more:
            try:
                proposer = make(message)
            except Exception:
                _log.exception("a proposer could not be made")
            else:
                if proposer is not None:
                    yield proposer

    def plan(self, sequences: Sequence[Drafted], rows: int) -> bool:
        """Draft for the sequences that decode in a step; `take` returns the drafts of each. Return whether there are any.

        Args:
            rows: rows of the step without drafts.
        """
        slots, planned, self._num_sequences = [], [], max(1, len(sequences))
        for sequence in sequences:
            if not self.drafts_for(sequence):
                continue
            assert sequence.drafts is not None
            survival = self._propose(sequence, sequence.drafts)
            if survival:
                slots.append(Slot(survival, self._has_states))
                planned.append(sequence.drafts)
        if slots:
            choose_depths(slots, len(sequences), rows, self.costs)
            for slot, drafts in zip(slots, planned, strict=True):
                drafts.depth = slot.depth
        return bool(slots)

    def plan_prompt(self, sequence: Drafted, rows: int) -> bool:
        """Draft for a sequence whose next step computes the last `rows` tokens of its prompt. Return whether there are drafts.

        Only the text that a request gives says how an answer begins, so the other proposers wait for the first token.
        """
        if not sequence.message.draft_token_ids or not self.drafts_for(sequence):
            return False
        assert sequence.drafts is not None
        survival = self._propose(sequence, sequence.drafts)
        sequence.drafts.depth = choose_depth(survival, rows, self.costs, self._token_seconds)
        return sequence.drafts.depth > 0

    @property
    def _token_seconds(self) -> float:
        """A token's share of the last step that decoded."""
        return self.costs.seconds(self._num_sequences) / self._num_sequences

    def _propose(self, sequence: Drafted, drafts: SequenceDrafts) -> Sequence[float]:
        """Ask the proposers of a sequence, and choose the one with the most expected tokens. Return its survival."""
        drafts.proposals, drafts.chosen, drafts.depth = [], None, 0
        drafts.length = len(sequence.token_ids)
        best: Sequence[float] = ()
        for proposer in list(drafts.proposers):
            try:
                tokens = proposer.propose(sequence, self.limits.depth)
                tokens = self._valid(tokens)
                matched = int(proposer.matched)
            except Exception:
                _log.exception("the proposer %s failed and is dropped for its sequence", proposer.name)
                drafts.proposers.remove(proposer)
                for count in drafts.count(proposer.name), self._count(proposer.name):
                    count.failed += 1
                continue
            if not tokens:
                continue
            proposal = _Proposal(proposer, tokens, max(0, matched))
            drafts.proposals.append(proposal)
            survival = drafts.rates.survival(proposer.name, proposal.matched, len(tokens))
            if sum(survival) > sum(best):
                best, drafts.chosen = survival, proposal
        return best

    def _valid(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return guesses up to the first one that is no token."""
        tokens = tokens[: self.limits.depth]
        for position, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                return tokens[:position]
        return tokens

    def take(self, sequence: Drafted, most: int) -> Sequence[int]:
        """Return the guesses that `plan` chose for a sequence, at most `most`."""
        drafts = sequence.drafts
        if drafts is None or drafts.chosen is None or drafts.length != len(sequence.token_ids):
            return ()
        return drafts.chosen.tokens[: min(drafts.depth, most)]

    def settle(self, sequence: Drafted, num_verified: int) -> None:
        """Learn from the tokens that a step has added. `num_verified`: guesses that were rows of the step."""
        drafts = sequence.drafts
        if drafts is None or not drafts.proposals:
            return
        new = sequence.token_ids[drafts.length :]
        for proposal in drafts.proposals:
            name, right = proposal.proposer.name, 0
            for guess, token in zip(proposal.tokens, new, strict=False):
                drafts.rates.observe(name, proposal.matched + right, guess == token)
                if guess != token:
                    break
                right += 1
            if proposal is drafts.chosen and num_verified:
                accepted = min(right, num_verified)
                drafts.count(name).add(num_verified, accepted)
                self._count(name).add(num_verified, accepted)
                self._judge(drafts, proposal.proposer)
            if isinstance(proposal.proposer, PredictedProposer):
                self._judge_prediction(drafts, proposal.proposer)
        drafts.proposals, drafts.chosen = [], None

    def _judge_prediction(self, drafts: SequenceDrafts, proposer: PredictedProposer) -> None:
        """Switch off what the worker predicts if even the best depth saves less time than the predictions take."""
        drafts.predictions += 1
        if drafts.predictions < _TRIALS or proposer not in drafts.proposers:
            return
        one_row, step = self.costs.seconds(1), self._token_seconds
        survival = drafts.rates.survival(proposer.name, 0, self.limits.predicted)
        saved = accumulate(survival)
        gains = (total * step - (self.costs.seconds(1 + depth) - one_row) for depth, total in enumerate(saved, start=1))
        if max(gains) < self._predict_seconds:
            self._switch_off(drafts, proposer)

    def _judge(self, drafts: SequenceDrafts, proposer: Proposer) -> None:
        """Switch a proposer off for its sequence if its drafts have cost more than they saved."""
        count = drafts.count(proposer.name)
        if count.drafts < _TRIALS:
            return
        price = self.costs.seconds(2) / self.costs.seconds(1) - 1
        if count.accepted[0] < price * count.drafts:
            self._switch_off(drafts, proposer)

    def _switch_off(self, drafts: SequenceDrafts, proposer: Proposer) -> None:
        drafts.proposers.remove(proposer)
        for count in drafts.count(proposer.name), self._count(proposer.name):
            count.switched_off += 1

    def end_answer(self, sequence: Drafted) -> None:
        """Keep a finished answer for later ones."""
        if self.corpus is not None and sequence.drafts is not None:
            self.corpus.add(_key(sequence.message), sequence.token_ids, sequence.turn_start)

    def start_step(self, rows: int) -> None:
        """Note that a step begins. `rows`: its rows, or 0 if its time says nothing about steps that decode."""
        self._rows, self._started = rows, self._now()

    def end_step(self, predict_seconds: float = 0.0, num_predicted: int = 0) -> None:
        """Record the seconds of the step, and those of the predictions that the worker made for so many sequences after it."""
        if self._rows:
            self.costs.observe(self._rows, self._now() - self._started - predict_seconds)
            if num_predicted:
                seconds = predict_seconds / num_predicted
                self._predict_seconds += _WEIGHT * (seconds - self._predict_seconds) if self._predict_seconds else seconds
        self._rows = 0

    @property
    def stats(self) -> tuple[DraftStats, ...]:
        """Statistics of each proposer, over all requests."""
        return tuple(count.stats(name) for name, count in self._counts.items())

    def _count(self, name: str) -> _Count:
        return self._counts.setdefault(name, _Count())


def _key(message: EngineRequest) -> Hashable:
    """Return whose answers a sequence may see in the corpus."""
    return message.salt, message.adapter
