"""Proposes what followed the last tokens in finished answers of the same tenant."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .proposer import DraftedSequence, match_length

_WINDOW = 3  # tokens that find a place
_LONGEST = 24
_TOKEN_BYTES = 256  # of a token and its entry of the index, estimated
_BITS = 24  # of a place in an answer, which is below 2**24


@dataclass
class _Shelf:
    """The answers of one tenant."""

    answers: dict[int, array[int]] = field(default_factory=dict)  # number -> tokens
    index: dict[tuple[int, ...], int] = field(default_factory=dict)  # window -> number and place of the last one
    known: dict[int, int] = field(default_factory=dict)  # hash of an answer -> its number


class Corpus:
    """Finished answers, with the last tokens of their prompts, which find the beginning of an answer to a prompt of that shape.

    Sequences see the answers of their own tenant and adapter only: the key. The oldest answers go first.

    Args:
        max_bytes: limit on the memory of all answers and of the index. max_answers: limit on their number.
    """

    def __init__(self, max_bytes: int = 32 << 20, max_answers: int = 10_000) -> None:
        self._max_tokens, self._max_answers = max_bytes // _TOKEN_BYTES, max_answers
        self._shelves: dict[Hashable, _Shelf] = {}
        self._order: deque[tuple[Hashable, int, int]] = deque()  # key, number and hash, the oldest first
        self._number = self._num_tokens = 0

    @property
    def num_bytes(self) -> int:
        return self._num_tokens * _TOKEN_BYTES

    def add(self, key: Hashable, token_ids: Sequence[int], start: int) -> None:
        """Add the answer that begins at `start`."""
        tokens = array("q", token_ids[max(0, start - _WINDOW) :])
        digest = hash(tokens.tobytes())
        if len(tokens) <= _WINDOW or len(tokens) > min(self._max_tokens, (1 << _BITS) - 1) or not self._max_answers:
            return
        shelf = self._shelves.setdefault(key, _Shelf())
        if digest in shelf.known:
            return
        self._number += 1
        self._num_tokens += len(tokens)
        shelf.answers[self._number], shelf.known[digest] = tokens, self._number
        self._order.append((key, self._number, digest))
        for position, gram in _windows(tokens):
            shelf.index[gram] = self._number << _BITS | position
        while self._num_tokens > self._max_tokens or len(self._order) > self._max_answers:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, number, digest = self._order.popleft()
        shelf = self._shelves[key]
        tokens = shelf.answers.pop(number)
        del shelf.known[digest]
        self._num_tokens -= len(tokens)
        for _, gram in _windows(tokens):
            if shelf.index.get(gram, 0) >> _BITS == number:
                del shelf.index[gram]
        if not shelf.answers:
            del self._shelves[key]

    def find(self, key: Hashable, token_ids: Sequence[int]) -> tuple[Sequence[int], int] | None:
        """Return the last answer with the last tokens of a sequence, and the place after them."""
        shelf = self._shelves.get(key)
        entry = None if shelf is None else shelf.index.get(tuple(token_ids[-_WINDOW:]))
        if shelf is None or entry is None:
            return None
        return shelf.answers[entry >> _BITS], entry & (1 << _BITS) - 1


class CorpusProposer:
    """Follows a finished answer as long as it agrees, then looks for another one. `key`: see Corpus."""

    name = "corpus"

    def __init__(self, corpus: Corpus, key: Hashable) -> None:
        self._corpus, self._key, self.matched = corpus, key, 0
        self._source: Sequence[int] = ()
        self._place = self._read = 0

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        token_ids = sequence.token_ids
        new = token_ids[self._read :]
        if new and self._source and list(self._source[self._place : self._place + len(new)]) == new:
            self._place += len(new)
        else:
            entry = self._corpus.find(self._key, token_ids)
            self._source, self._place = entry or ((), 0)
        self._read = len(token_ids)
        self.matched = match_length(self._source, self._place, token_ids, _LONGEST)
        return self._source[self._place : self._place + budget]


def _windows(tokens: Sequence[int]) -> enumerate[tuple[int, ...]]:
    """Return (place after it, window) of all windows."""
    return enumerate(zip(*(tokens[i:] for i in range(_WINDOW)), strict=False), start=_WINDOW)
