"""Splits tool calls from the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .call_formats import CallFormat, Functions
from .pieces import Arguments, Call, Content, Piece, marker_pattern, num_held


class CallSplitter:
    """Reads an answer in chunks. However it is cut, the pieces together are the same.

    A call is returned when it is complete. A block that cannot be parsed is returned as text.

    Args:
        form: None only drops special tokens.
        drop: special tokens to leave out of the text, because the answer is decoded with them.
        most: maximum number of calls; further ones are left out.
    """

    def __init__(
        self, form: CallFormat | None, functions: Functions, drop: Sequence[str] = (), most: int | None = None
    ) -> None:
        self._form, self._functions = form, functions
        own = () if form is None else (form.begin, form.end)
        self._begin = "" if form is None else form.begin
        self._drop = [one for one in drop if one not in own]
        self._markers = [*own[:1], *self._drop]
        self._pattern = marker_pattern(self._markers)
        self._most = most
        self._calls = 0
        self._text, self._searched = "", 0
        self._block: str | None = None  # whitespace and marker before the current block
        self._may_be_bare = form is not None and form.bare

    def push(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while (found := self._next()) is not None:
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the answer."""
        text, self._text = self._text, ""
        if self._block is not None:
            return self._parse(text, "")
        return [Content(text)] if text else []

    def _next(self) -> list[Piece] | None:
        """Return the pieces up to the next marker; None if there is none yet."""
        if self._block is not None:
            return self._end_of_block()
        if self._may_be_bare:
            if not self._text.strip():
                return None
            self._may_be_bare = False
            if self._text.lstrip().startswith("{"):
                self._block = ""
                return []
        found = self._pattern.search(self._text)
        if found is None:
            keep = len(self._text) - num_held(self._text, self._markers)
            text, self._text = self._text[:keep], self._text[keep:]
            return [Content(text)] if text else None
        marker = found[0]
        text, self._text = self._text[: found.start()], self._text[found.end() :]
        if marker == self._begin:
            before, text = text, text.rstrip()
            self._block, self._searched = before[len(text) :] + marker, 0
        return [Content(text)] if text else []

    def _end_of_block(self) -> list[Piece] | None:
        assert self._form is not None
        end = self._form.end
        if end is None:
            return None
        place = self._text.find(end, self._searched)
        self._searched = max(0, len(self._text) - len(end) + 1)
        if place < 0:
            return None
        text, self._text = self._text[:place], self._text[place + len(end) :]
        return self._parse(text, end)

    def _parse(self, text: str, end: str) -> list[Piece]:
        """Return the calls of a block, or its text if it has another form."""
        assert self._form is not None
        block, self._block = self._block or "", None
        for one in self._drop:
            text = text.replace(one, "")
        try:
            calls = self._form.parse(text, self._functions)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return [Content(block + text + end)] if block + text + end else []
        calls = calls[: None if self._most is None else max(0, self._most - self._calls)]
        self._calls += len(calls)
        return list(calls)


class ForcedCalls:
    """Reads an answer whose format is that of `ChatBody.forced_format`.

    Args:
        name: the function whose arguments the answer is, or "" if the answer is a list of calls.
    """

    def __init__(self, name: str) -> None:
        self._name, self._text, self._started = name, "", False

    def push(self, text: str) -> list[Piece]:
        if not self._name:
            self._text += text
            return []
        started, self._started = self._started, True
        return [Arguments(text) if started else Call(self._name, text)] if text or not started else []

    def finish(self) -> list[Piece]:
        if self._name:
            return []
        try:
            calls = json.loads(self._text)
            return [Call(one["name"], json.dumps(one["parameters"], ensure_ascii=False)) for one in calls]
        except (ValueError, KeyError, TypeError):  # cut off at the token limit
            return [Content(self._text)] if self._text else []
