"""Calls of custom tools, which a model writes as calls of functions with the one argument `input`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .parsers.answer import AnswerParser
from .parsers.pieces import Arguments, Call, Piece
from .protocol.tools import as_input


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom tool with its text; pieces of the type Arguments may continue it."""

    name: str
    input: str


class CustomCallParser:
    """An AnswerParser whose calls of custom tools are CustomCall pieces.

    A call is returned when it is complete, because its text is inside JSON; without JSON, it is returned as it comes.

    Args:
        names: the custom tools.
        is_plain: the answer is the text of a call, without JSON.
    """

    def __init__(self, parser: AnswerParser, names: Collection[str], is_plain: bool) -> None:
        self._parser, self._names, self._is_plain = parser, names, is_plain
        self._name, self._arguments = "", list[str]()  # of the call that is not complete

    @property
    def in_reasoning(self) -> bool:
        return self._parser.in_reasoning

    def push(self, text: str) -> list[Piece | CustomCall]:
        return self._pieces(self._parser.push(text))

    def finish(self) -> list[Piece | CustomCall]:
        """Return what was held back, at the end of the answer."""
        return [*self._pieces(self._parser.finish()), *self._complete()]

    def _pieces(self, pieces: Sequence[Piece]) -> list[Piece | CustomCall]:
        result: list[Piece | CustomCall] = []
        for piece in pieces:
            if isinstance(piece, Arguments) and self._name:
                self._arguments.append(piece.text)
                continue
            result += self._complete()
            if not isinstance(piece, Call) or piece.name not in self._names:
                result.append(piece)
            elif self._is_plain:
                result.append(CustomCall(piece.name, piece.arguments))
            else:
                self._name, self._arguments = piece.name, [piece.arguments]
        return result

    def _complete(self) -> list[CustomCall]:
        name, self._name = self._name, ""
        return [CustomCall(name, as_input("".join(self._arguments)))] if name else []
