"""One parser for a whole answer: reasoning first, then text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .call_formats import FORMATS, CallFormat, Functions, find_format
from .calls import CallSplitter, ForcedCalls
from .pieces import Content, Piece
from .reasoning import ReasoningSplitter, find_markers
from .vllm_names import OTHER_NAMES

PARSERS = ("auto", "none", *FORMATS, *OTHER_NAMES)
"""Values of the option `tool_call_parser`."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its reasoning and its calls.

    Args:
        reasoning: markers of the reasoning, or None.
        specials: special tokens of the vocabulary.
    """

    reasoning: tuple[str, str] | None = None
    calls: CallFormat | None = None
    specials: tuple[str, ...] = ()

    def needs_specials(self, has_tools: bool) -> bool:
        """Return whether markers are special tokens, so that answers must be decoded with them."""
        markers = [*(self.reasoning or ()), self.calls.begin if self.calls and has_tools else ""]
        return any(marker in self.specials for marker in markers)


def answer_format(template: str | None, specials: Sequence[str], calls: str, reasoning: str) -> AnswerFormat:
    """Return the format of a model's answers.

    Args:
        template: the chat template, which mentions the markers.
        calls: one of PARSERS; "auto" looks into the template.
        reasoning: "auto" or "none".
    """
    found = find_format(template or "") if calls == "auto" else FORMATS.get(OTHER_NAMES.get(calls, calls))
    markers = find_markers(template or "") if reasoning == "auto" else None
    return AnswerFormat(markers, found, tuple(specials))


class AnswerParser:
    """Reads one answer in chunks.

    Args:
        prompt: the rendered prompt, which may end inside the reasoning.
        functions: the functions that the model may call.
        forced: as in ForcedCalls; None if the model may choose.
        with_specials: the answer is decoded with special tokens.
    """

    def __init__(
        self,
        form: AnswerFormat,
        prompt: str,
        functions: Functions,
        forced: str | None = None,
        most: int | None = None,
        with_specials: bool = False,
    ) -> None:
        drop = form.specials if with_specials else ()
        self._reasoning: ReasoningSplitter | None = None
        self._calls: CallSplitter | ForcedCalls | None = None
        if forced is not None:
            self._calls = ForcedCalls(forced)
        elif functions and form.calls is not None:
            self._calls = CallSplitter(form.calls, functions, drop, most)
        elif drop:
            self._calls = CallSplitter(None, functions, drop)
        if form.reasoning is not None and forced is None:
            begin, end = form.reasoning
            self._reasoning = ReasoningSplitter(begin, end, prompt.rstrip().endswith(begin))

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    def push(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._text(text)
        pieces, rest = self._reasoning.push(text)
        return [*pieces, *self._text(rest)]

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the answer."""
        pieces, rest = ([], "") if self._reasoning is None else self._reasoning.finish()
        pieces = [*pieces, *self._text(rest)]
        return pieces if self._calls is None else [*pieces, *self._calls.finish()]

    def _text(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.push(text)
        return [Content(text)] if text else []
