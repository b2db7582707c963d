"""Splits an answer into reasoning, text and tool calls by the markers around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from .block_ends import BlockEnd
from .call_formats import CallFormat
from .call_syntax import NO_CALLS
from .markers import MarkerSet, Scanner, markers_of
from .pieces import Call, Content, Piece, Reasoning
from .reasoning import ReasoningFormat
from .values import Functions


class _State(Enum):
    BEGIN = auto()  # nothing but whitespace so far; reasoning may begin
    ANSWER = auto()  # the same after the reasoning
    CONTENT = auto()
    REASONING = auto()
    BLOCK = auto()  # calls between markers
    BARE = auto()  # calls without markers, which last until the end
    HEADER = auto()  # the start of a message, before the marker that says what it is


_NO_REASONING = ReasoningFormat((), ())


@lru_cache(maxsize=64)
def _outside_blocks(dropped_tokens: frozenset[str], markers: tuple[str, ...]) -> MarkerSet:
    """Return the special tokens that do not belong to the syntax of calls."""
    return markers_of(token for token in dropped_tokens if not any(token in marker or marker in token for marker in markers))


@dataclass(frozen=True)
class AnswerStart:
    """Where the prompt ends: within the reasoning, or with the header, or the marker, before an answer ("" if with none)."""

    in_reasoning: bool = False
    last_marker: str = ""


class MarkerReader:
    """Reads the parts of an answer. However it is cut, the pieces together are the same.

    A call is returned when it is complete. A block that cannot be parsed is returned as text. Whitespace around reasoning and
    calls is left out.

    Args:
        reasoning, calls: None leaves them in the text.
        dropped_tokens: special tokens to leave out of the text, because the answer is decoded with them.
        max_calls: maximum number of calls; further ones are left out.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        functions: Functions,
        dropped_tokens: Sequence[str] = (),
        max_calls: int | None = None,
        start: AnswerStart = AnswerStart(),
    ) -> None:
        self._reasoning, self._calls, self._functions = reasoning or _NO_REASONING, calls, functions
        self._dropped_tokens, self._ends = frozenset(dropped_tokens), dict(calls.pairs if calls else ())
        self._headers = frozenset((*self._reasoning.headers, *(calls.headers if calls else ())))
        self._max_calls, self._num_calls = max_calls, 0
        self.pieces: list[Piece] = []
        self._start = ""  # of an answer that may be a call without a marker
        self._blank: list[str] = []  # whitespace that may come before a marker
        self._header: list[str] = []
        self._block: list[str] = []
        self._block_end: BlockEnd | None = None  # None: the next end marker ends the block
        self._checked = 0  # parts of the block that it has
        self._first_end: int | None = None  # part of the block that is an end marker within an argument
        self._outer = _State.CONTENT  # state before the block
        self._prefix = ""  # text before the block that belongs to it
        self._is_weak = False  # the block is one only if it calls known functions
        self._end: str | None = None
        self._trims = start.in_reasoning  # whitespace at the start of a part is left out
        self._has_content = self._leaves_out_end = False
        self._is_wrapped = start.last_marker in self._reasoning.answer_begins
        self._ends_early = False  # the first end marker ends a block
        self._sets: dict[tuple[_State, str | None, bool, _State], tuple[frozenset[str], MarkerSet]] = {}
        in_header = start.last_marker in self._headers
        self._enter(_State.REASONING if start.in_reasoning else _State.HEADER if in_header else _State.BEGIN)

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def on_text(self, text: str) -> None:
        if self._state in (_State.BLOCK, _State.BARE):
            self._block.append(text)
        elif self._state is _State.HEADER:
            self._header.append(text)
        elif self._state in (_State.BEGIN, _State.ANSWER):
            self._begin(text)
        else:
            self._write(text)

    def on_marker(self, marker: str) -> None:
        if marker not in self._active:  # another special token
            return
        if self._state is _State.BLOCK:
            if marker == self._end:
                self._check_end(marker)
                return
            while self._state is _State.BLOCK:
                self._end_block("", is_text=True)
        if self._state is _State.HEADER and self._end_header(marker):
            return
        self._settle()
        if marker in self._headers:
            self._blank = []
            self._enter(_State.HEADER)
        elif marker in self._ends:
            assert self._calls is not None
            self._outer, self._prefix = self._state, "".join(self._blank) + marker
            self._is_weak = marker in self._calls.weak
            self._end, self._blank = self._ends[marker], []
            self._block_end, self._checked = None if self._ends_early else BlockEnd(self._calls), 0
            self._enter(_State.BLOCK)
        elif marker in self._reasoning.begins:
            self._begin_reasoning(marker)
        elif marker in self._reasoning.ends:
            self._begin_answer(is_wrapped=not self._reasoning.answer_begins)
        elif marker in self._reasoning.answer_begins:
            self._begin_answer(is_wrapped=True)
        else:
            self._blank, self._leaves_out_end = [], True

    def finish(self) -> None:
        """Append what was held back to `pieces`, at the end of the answer."""
        if self._state is _State.HEADER:
            self._end_header("", is_text=True)
        self._settle()
        while self._state in (_State.BLOCK, _State.BARE):
            self._end_block("")
        if self._state is not _State.REASONING and not self._leaves_out_end:
            self._emit("".join(self._blank))
        self._blank = []

    def _enter(self, state: _State) -> None:
        """Go to a state and look for its markers. Special tokens are found everywhere but in calls."""
        self._state, key = state, (state, self._end, self._is_wrapped, self._outer)
        if key not in self._sets:
            active = self._markers_in(state)
            dropped = () if state in (_State.BLOCK, _State.BARE) else self._dropped_tokens
            self._sets[key] = active, markers_of(active, dropped)
        self._active, self.markers = self._sets[key]

    def _markers_in(self, state: _State) -> frozenset[str]:
        """Return the markers that mean something in a state."""
        reasoning = self._reasoning
        if state in (_State.BLOCK, _State.BARE):
            ends = reasoning.ends if self._outer is _State.REASONING else ()  # the model may only mention a call there
            return frozenset((*ends, *([self._end] if self._end else ())))
        if state is _State.REASONING:
            calls = self._ends if self._calls is not None and self._calls.in_reasoning else ()
            return frozenset((*reasoning.begins, *reasoning.ends, *calls))
        begins = reasoning.begins if reasoning.repeats or state is _State.BEGIN else ()
        if state is _State.HEADER:
            return frozenset((*reasoning.begins, *reasoning.answer_begins, *self._ends, *self._headers, *self._message_ends()))
        wraps = reasoning.answer_begins if state is not _State.CONTENT else ()
        ends = reasoning.answer_ends if self._is_wrapped else ()
        return frozenset((*begins, *self._ends, *wraps, *ends, *self._headers))

    def _message_ends(self) -> set[str]:
        """Return the markers after a part of any kind."""
        return {*self._reasoning.ends, *self._reasoning.answer_ends, *(end for end in self._ends.values() if end)}

    def _end_header(self, marker: str, is_text: bool = False) -> bool:
        """Leave a header at a marker. Return whether the marker ends the message.

        The header's text is then the message; before the marker of a part, it is a function's name, which is left out.
        """
        header, self._header = "".join(self._header), []
        is_end = is_text or marker in self._message_ends()
        self._enter(_State.CONTENT if self._has_content or is_end else _State.ANSWER)
        if is_end and header:
            self._trims = not self._has_content
            self._write(header)
            self._blank, self._leaves_out_end = ([], True) if marker else (self._blank, False)
        return is_end

    def _begin(self, text: str) -> None:
        """Take text at the beginning of the answer, which may be a call without a marker."""
        if not self._start:
            start = text.lstrip()
            if not self._trims:
                self._blank.append(text[: len(text) - len(start)])
            text = start
        self._start += text
        bare = False if not self._start or self._calls is None or self._calls.bare is None else self._calls.bare(self._start)
        if bare:
            self._prefix, self._end, self._block = "".join(self._blank), None, [self._start]
            self._outer, self._is_weak = self._state, True
            self._start, self._blank = "", []
            self._enter(_State.BARE)
        elif bare is False:
            self._settle()

    def _settle(self) -> None:
        """Take the held beginning of an answer as text."""
        if self._start:
            start, self._start = self._start, ""
            self._enter(_State.CONTENT)
            self._write(start)

    def _write(self, text: str) -> None:
        """Append text of the current part to `pieces`. Hold back whitespace at its end, which a marker may follow."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        body = text.rstrip()
        if body:
            self._emit("".join(self._blank) + body)
            self._blank = []
        if len(body) < len(text):
            self._blank.append(text[len(body) :])

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self.pieces.append(Reasoning(text))
        else:
            self.pieces.append(Content(text))
            self._has_content, self._leaves_out_end = True, False

    def _begin_reasoning(self, marker: str) -> None:
        if self._state is not _State.REASONING:
            if self._has_content:
                self._emit("".join(self._blank))
            self._blank, self._trims = [], True
            self._enter(_State.REASONING)
        elif not self._trims:  # else the model repeats the prompt's marker
            self._write(marker)

    def _begin_answer(self, is_wrapped: bool) -> None:
        self._blank, self._trims, self._is_wrapped = [], not self._has_content, is_wrapped
        self._enter(_State.CONTENT if self._has_content else _State.ANSWER)

    def _end_block(self, end: str, is_text: bool = False) -> None:
        """Append the calls of a block to `pieces`, or its text if it cannot be parsed.

        Args:
            is_text: the block is no call: the reasoning ends, or another block begins, before it ends.
        """
        assert self._calls is not None
        parts, first_end, prefix = self._block, self._first_end, self._prefix
        block, self._prefix, self._block, self._first_end = "".join(parts), "", [], None
        if self._dropped_tokens:
            block = _outside_blocks(self._dropped_tokens, self._calls.markers).pattern.sub("", block)
        outer = _State.REASONING if self._outer is _State.REASONING else _State.CONTENT
        try:
            calls = None if is_text else self._parse(block)
        except NO_CALLS:
            calls = None
        if calls is None and first_end is not None:
            self._prefix, self._block = prefix, parts[:first_end]
            self._end_block(parts[first_end])
            self._read_again("".join(parts[first_end + 1 :]) + end)
            return
        self._trims = False
        self._enter(outer)
        if calls is None:
            self._write(prefix + block + end)
            return
        calls = calls[: None if self._max_calls is None else max(0, self._max_calls - self._num_calls)]
        self._num_calls += len(calls)
        self.pieces += calls
        self._leaves_out_end = True

    def _check_end(self, marker: str) -> None:
        """End the block at an end marker, unless it is a part of an argument."""
        if (block_end := self._block_end) is None:
            self._end_block(marker)
            return
        block_end.add("".join(self._block[self._checked :]))
        if block_end.has_other_begin or block_end.is_complete:
            self._end_block(marker, is_text=block_end.has_other_begin)
            return
        self._first_end = len(self._block) if self._first_end is None else self._first_end
        self._block.append(marker)
        self._checked = len(self._block)

    def _read_again(self, text: str) -> None:
        """Read the text after the first end marker of a block that is no call when it goes on until a later one."""
        self._ends_early = True
        Scanner().scan(text, self, is_last=True)
        self._ends_early = False

    def _parse(self, block: str) -> list[Call]:
        """Return the calls of a block, or raise one of NO_CALLS."""
        assert self._calls is not None
        if not self._is_weak:
            return self._calls.parse(block, self._functions)
        calls = (self._calls.parse_weak or self._calls.parse)(block, self._functions)
        if not all(call.name in self._functions for call in calls):
            raise ValueError("it is no call of a function")
        return calls


class PlainReader:
    """Returns a whole answer as text.

    Args:
        dropped_tokens: special tokens to leave out.
    """

    in_reasoning = False

    def __init__(self, dropped_tokens: Sequence[str] = ()) -> None:
        self.pieces: list[Piece] = []
        self.markers = markers_of(dropped_tokens)

    def on_text(self, text: str) -> None:
        self.pieces.append(Content(text))

    def on_marker(self, marker: str) -> None:
        """Do nothing, so that the special token is left out."""

    def finish(self) -> None:
        """Do nothing: no text is held back."""
