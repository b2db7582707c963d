"""Proposes `draft_text`: what a caller, a PDF's text layer or an earlier hypothesis expects the answer to be."""

from __future__ import annotations

from collections.abc import Sequence

from .proposer import DraftedSequence, match_length

_WINDOW = 3  # tokens that find the place again anywhere in the text
_NEAR = 8  # tokens after the last known place where one or two tokens find it again
_LONGEST = 24
_INDEXED = 1024  # tokens that a step adds to the index, so that a long text does not hold up the other sequences


class DraftTextProposer:
    """Follows a text along the answer.

    After a token that differs, the text goes on at the nearest place that the last two tokens name (after the first
    difference, the last one), else behind the token that was replaced; later, wherever the last three tokens stand, in any
    order of lines.

    Args:
        name: as in Proposer. text: the expected tokens.
    """

    def __init__(self, name: str, text: Sequence[int]) -> None:
        self.name, self.matched = name, 0
        self._text = text
        self._place = self._anchor = 0  # next token of the text; the first one that differed
        self._misses = 0  # tokens that differed since the text was last followed
        self._start = self._read = 0  # first token of the answer, and the tokens compared so far
        self._places: dict[tuple[int, ...], list[int]] = {}  # window -> places after it
        self._indexed = 0  # windows in it

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        token_ids = sequence.token_ids
        if len(token_ids) < self._read or sequence.turn_start != self._start:
            self._start = self._read = sequence.turn_start
            self._place = self._anchor = self._misses = self.matched = 0
        for end in range(self._read + 1, len(token_ids) + 1):
            self._follow(token_ids, end)
        self._read = len(token_ids)
        return self._text[self._place : self._place + budget] if self._misses <= _NEAR else ()

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Move behind the token before `end`."""
        token, text = token_ids[end - 1], self._text
        if self._place < len(text) and text[self._place] == token and self._misses <= _NEAR:
            self._place, self.matched, self._misses = self._place + 1, self.matched + 1, 0
            return
        self._anchor = self._anchor if self._misses else self._place
        self._misses += 1
        answer = token_ids[max(self._start, end - _LONGEST) : end]
        position = self._find(answer)
        if position is None:
            self._place, self.matched = min(self._anchor + self._misses, len(text)), 0
            return
        self._place, self._misses = position, 0
        self.matched = match_length(text, position, answer, _LONGEST)

    def _find(self, answer: Sequence[int]) -> int | None:
        """Return the place after the last tokens of the answer, or None."""
        if len(answer) >= _WINDOW:
            places = self._find_window(tuple(answer[-_WINDOW:]))
            if places:
                return next((position for position in places if position > self._anchor), places[0])
        size = 1 if self._misses == 1 else 2
        last, text = list(answer[-size:]), self._text
        if len(last) == size and self._misses <= _NEAR:
            stop = min(len(text) - size, self._anchor + _NEAR + self._misses)
            for first in range(self._anchor, stop + 1):
                if list(text[first : first + size]) == last:
                    return first + size
        return None

    def _find_window(self, window: tuple[int, ...]) -> Sequence[int]:
        first, stop = self._indexed, max(0, min(self._indexed + _INDEXED, len(self._text) - _WINDOW + 1))
        for start in range(first, stop):
            self._places.setdefault(tuple(self._text[start : start + _WINDOW]), []).append(start + _WINDOW)
        self._indexed = max(first, stop)
        return self._places.get(window, ())
