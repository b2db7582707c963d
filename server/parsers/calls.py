"""Reads answers that a grammar constrains to tool calls."""

from __future__ import annotations

from .markers import markers_of
from .pieces import Arguments, Call, Content, Piece
from .values import dump_json, load_json


class ForcedCalls:
    """Reads an answer whose format is that of `ChatBody.forced_format`.

    Args:
        name: the function whose arguments the answer is, or "" if the answer is a list of calls.
    """

    in_reasoning = False

    def __init__(self, name: str) -> None:
        self._name, self._started = name, False
        self._text: list[str] = []
        self.pieces: list[Piece] = []
        self.markers = markers_of()

    def on_text(self, text: str) -> None:
        if not self._name:
            self._text.append(text)
            return
        self.pieces.append(Arguments(text) if self._started else Call(self._name, text))
        self._started = True

    def on_marker(self, marker: str) -> None:
        """Do nothing: this format has no markers."""

    def finish(self) -> None:
        if self._name:
            if not self._started:
                self.pieces.append(Call(self._name, ""))
            return
        text = "".join(self._text)
        try:
            self.pieces += [Call(call["name"], dump_json(call["parameters"])) for call in load_json(text)]
        except (ValueError, KeyError, TypeError, RecursionError):  # cut off at the token limit
            self.pieces += [Content(text)] if text else []
