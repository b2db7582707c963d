"""Proposes what followed the last tokens where they stood before, in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Sequence

from .proposer import DraftedSequence, match_length

_MAX_PLACES = 16  # earlier places that a step looks at
_NEW = 64  # tokens that a step adds at most if the source is to go on
_NEAR = 8  # tokens after the first one that differed where the source may go on
_INDEXED = 1024  # tokens that a step adds to the index, so that a long prompt does not hold up the other sequences


class SuffixProposer:
    """Finds the longest suffix of a sequence that occurs in it before, among the last 16 places; the latest one wins a tie.

    If none does, the source goes on behind a few tokens that differ from it, such as the values of a table's next row: at the
    nearest token that equals the last one, else as many tokens further as differed.

    The n-grams of the sequence are chained as in LZ77 (Ziv and Lempel, 1977): a place names the place before that has the same
    n-gram. A new token costs one entry of a dictionary and one of a list.

    Args:
        shortest: length of the n-grams, the shortest suffix that counts. longest: more tokens are not compared.
    """

    name = "suffix"

    def __init__(self, shortest: int = 3, longest: int = 24) -> None:
        self._shortest, self._longest, self.matched = shortest, max(shortest, longest), 0
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> the last place after it
        self._before: list[int] = []  # place -> the place before with the same n-gram, or 0
        self._source = self._end = 0  # the last source, and the end of the sequence that it followed
        self._anchor = self._misses = 0  # the first token of the source that differed, and how many did since

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        token_ids = sequence.token_ids
        self._read(token_ids)
        end, best, self.matched = len(token_ids), 0, 0
        earlier_end = self._before[end] if end < len(self._before) else 0
        for _ in range(_MAX_PLACES):
            if not earlier_end or self.matched >= self._longest:
                break
            length = match_length(token_ids, earlier_end, token_ids, self._longest)
            if length > self.matched:
                best, self.matched = earlier_end, length
            earlier_end = self._before[earlier_end]
        if self.matched < self._shortest:
            best = self._follow(token_ids)
        else:
            self._misses = 0
        self._source, self._end = best, end
        if not best:
            return ()
        guesses = token_ids[best : best + budget]
        while len(guesses) < budget:  # the source reaches the end, so it goes on with its own guesses: a cycle
            guesses += guesses[: budget - len(guesses)]
        return guesses

    def _follow(self, token_ids: Sequence[int]) -> int:
        """Return where the last source goes on, or 0 if it differs for too long."""
        if not self._source or not 0 <= len(token_ids) - self._end <= _NEW:
            return 0
        position = self._source
        for end in range(self._end, len(token_ids)):
            token = token_ids[end]
            if token_ids[position] == token:
                position, self._misses = position + 1, 0
                continue
            self._anchor = self._anchor if self._misses else position
            self._misses += 1
            near = range(self._anchor, min(self._anchor + _NEAR, end))
            position = next((other for other in near if token_ids[other] == token), self._anchor + self._misses - 1) + 1
        self.matched = match_length(token_ids, position, token_ids, self._longest)
        return position if self._misses <= _NEAR else 0

    def _read(self, token_ids: Sequence[int]) -> None:
        """Add the n-grams of new tokens. Entries of replaced tokens remain; comparing the tokens rejects them."""
        if len(token_ids) + 1 < len(self._before):
            self._last.clear()
            self._before.clear()
        first = max(0, len(self._before) - self._shortest)
        if not self._before:
            self._before = [0] * min(self._shortest, len(token_ids) + 1)
        part = token_ids[first : first + _INDEXED + self._shortest]
        grams = zip(*(part[shift:] for shift in range(self._shortest)), strict=False)
        for position, gram in enumerate(grams, start=first + self._shortest):
            self._before.append(self._last.get(gram, 0))
            self._last[gram] = position
