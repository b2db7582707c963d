"""Splits the reasoning, such as `<think>...</think>`, from the answer after it."""

from __future__ import annotations

from .pieces import Piece, Reasoning, num_held

MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
"""Begin and end of the reasoning in published templates."""


def find_markers(template: str) -> tuple[str, str] | None:
    """Return the markers that a chat template mentions."""
    return next((pair for pair in MARKERS if any(marker in template for marker in pair)), None)


class ReasoningSplitter:
    """Reads an answer in chunks. However it is cut, the pieces together are the same.

    Whitespace around the reasoning is left out.

    Args:
        is_open: the prompt ends inside the reasoning.
    """

    def __init__(self, begin: str, end: str, is_open: bool) -> None:
        self._begin, self._end = begin, end
        self._state = "reasoning" if is_open else "start"
        self._text = ""
        self._is_blank = True  # nothing was returned in this state

    @property
    def is_inside(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the reasoning in a chunk, and the text after it."""
        self._text += text
        if self._state == "start":
            start = self._text.lstrip()
            if start.startswith(self._begin):
                self._state, self._text = "reasoning", start[len(self._begin) :]
            elif not self._begin.startswith(start):
                self._state, self._is_blank = "answer", False
        pieces: list[Piece] = []
        if self._state == "reasoning":
            pieces = self._reasoning()
        return pieces, self._answer() if self._state == "answer" else ""

    def finish(self) -> tuple[list[Piece], str]:
        """Return what was held back, at the end of the answer."""
        text, self._text = self._text, ""
        if self._state != "reasoning":
            return [], text if self._state == "start" or not self._is_blank else ""
        return self._pieces(text.rstrip()), ""

    def _reasoning(self) -> list[Piece]:
        place = self._text.find(self._end)
        if place < 0:
            keep = len(self._text) - num_held(self._text, (self._end,))
            text, self._text = self._text[:keep], self._text[keep:]
            return self._pieces(text)
        text, self._text = self._text[:place], self._text[place + len(self._end) :]
        pieces = self._pieces(text.rstrip())
        self._state, self._is_blank = "answer", True
        return pieces

    def _pieces(self, text: str) -> list[Piece]:
        text = self._trim(text)
        return [Reasoning(text)] if text else []

    def _answer(self) -> str:
        text, self._text = self._trim(self._text), ""
        return text

    def _trim(self, text: str) -> str:
        """Leave out whitespace at the start of the reasoning or of the answer after it."""
        text = text.lstrip() if self._is_blank else text
        self._is_blank = self._is_blank and not text
        return text
