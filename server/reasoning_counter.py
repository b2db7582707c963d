"""Counts the tokens of an answer's reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .custom_calls import CustomCallParser
from .parsers.answer import AnswerParser


class ReasoningCounter:
    """Reads an answer token by token, with a parser of its own, so that whole answers and streams give the same count.

    Markers count as reasoning.

    Args:
        decode: returns the text of each further token.
    """

    def __init__(self, parser: AnswerParser | CustomCallParser, decode: Callable[[list[int]], str]) -> None:
        self._parser, self._decode = parser, decode
        self.num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            inside = self._parser.in_reasoning
            self._parser.push(self._decode([token]))
            self.num_tokens += inside or self._parser.in_reasoning
