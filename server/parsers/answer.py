"""One parser for a whole answer: reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import call_formats, reasoning
from .call_formats import CallFormat, find_format
from .calls import ForcedCalls
from .harmony import HarmonyReader
from .markers import Scanner
from .pieces import Piece
from .reasoning import ReasoningFormat, find_reasoning
from .splitter import AnswerStart, MarkerReader, PlainReader
from .values import Functions
from .vllm_names import ARCHITECTURES, CALL_PARSERS, REASONING_PARSERS

PARSERS = ("auto", "none", *sorted({*call_formats.FORMATS, *CALL_PARSERS}))
"""Values of the option `tool_call_parser`."""
REASONING_PARSER_NAMES = ("auto", "none", *sorted({*reasoning.FORMATS, *REASONING_PARSERS}))
"""Values of the option `reasoning_parser`."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes its reasoning and its calls.

    Args:
        specials: special tokens of the vocabulary.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    specials: tuple[str, ...] = ()

    @property
    def is_harmony(self) -> bool:
        return self.reasoning is reasoning.HARMONY or self.calls is call_formats.HARMONY

    def needs_specials(self, has_tools: bool) -> bool:
        """Return whether markers have special tokens, so that answers must be decoded with them."""
        calls = self.calls.markers if self.calls is not None and has_tools else ()
        markers = [*(self.reasoning.markers if self.reasoning else ()), *calls]
        if self.is_harmony:
            markers += HarmonyReader.MARKERS
        return any(token in marker for token in self.specials if token for marker in markers)


def answer_format(
    template: str | None, specials: Sequence[str], calls: str, reasoning_name: str, architecture: str | None = None
) -> AnswerFormat:
    """Return the format of a model's answers.

    Args:
        template: the chat template, which mentions the markers.
        calls: one of PARSERS; "auto" looks into the template, and at the architecture.
        reasoning_name: one of REASONING_PARSER_NAMES, alike.
    """
    of_calls, of_reasoning = ARCHITECTURES.get(architecture or "", ("none", "none"))
    call_format = find_format(template or "") if calls == "auto" else None
    if call_format is None:
        name = of_calls if calls == "auto" else calls
        call_format = call_formats.FORMATS.get(CALL_PARSERS.get(name, name))
    reasoning_format = find_reasoning(template or "") if reasoning_name == "auto" else None
    if reasoning_format is None:
        name = of_reasoning if reasoning_name == "auto" else reasoning_name
        reasoning_format = reasoning.FORMATS.get(REASONING_PARSERS.get(name, name))
    return AnswerFormat(reasoning_format, call_format, tuple(specials))


@dataclass(frozen=True)
class AnswerRules:
    """What a request says about its answer.

    Attributes:
        forced: as in ForcedCalls; None if the model may choose.
        max_calls: maximum number of calls; further ones are left out.
        with_specials: the answer is decoded with special tokens.
        continued: the beginning of the answer, if the prompt ends with it.
        is_constrained: the answer is JSON, or matches a regular expression or a choice: it is text, even where it has markers.
        in_grammar: a grammar constrains the answer from its first token, which the prompt's reasoning does not go on in.
    """

    forced: str | None = None
    max_calls: int | None = None
    with_specials: bool = False
    continued: str = ""
    is_constrained: bool = False
    in_grammar: bool = False


class AnswerParser:
    """Reads one answer in chunks.

    Args:
        prompt: the rendered prompt, which may end inside the reasoning.
        functions: the functions that the model may call.
    """

    def __init__(
        self, answer_format: AnswerFormat, prompt: str, functions: Functions, rules: AnswerRules = AnswerRules()
    ) -> None:
        dropped_tokens = answer_format.specials if rules.with_specials else ()
        calls, reasoning_format = answer_format.calls if functions else None, answer_format.reasoning
        self._scanner = Scanner()
        self._reader: MarkerReader | HarmonyReader | PlainReader | ForcedCalls
        if rules.forced is not None:
            self._reader = ForcedCalls(rules.forced)
        elif rules.is_constrained:
            self._reader = PlainReader(dropped_tokens)
        elif answer_format.is_harmony:
            of_calls = functions if answer_format.calls is call_formats.HARMONY else {}
            self._reader = HarmonyReader(
                prompt, of_calls, reasoning_format is reasoning.HARMONY, dropped_tokens, rules.max_calls
            )
        elif calls is None and reasoning_format is None:
            self._reader = PlainReader(dropped_tokens)
        else:
            start = _answer_start(reasoning_format, calls, prompt, rules)
            self._reader = MarkerReader(reasoning_format, calls, functions, dropped_tokens, rules.max_calls, start)

    @property
    def in_reasoning(self) -> bool:
        return self._reader.in_reasoning

    def push(self, text: str) -> list[Piece]:
        self._scanner.scan(text, self._reader)
        return self._take()

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the answer."""
        self._scanner.scan("", self._reader, is_last=True)
        self._reader.finish()
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._reader.pieces = self._reader.pieces, []
        return pieces


def _answer_start(
    reasoning_format: ReasoningFormat | None, calls: CallFormat | None, prompt: str, rules: AnswerRules
) -> AnswerStart:
    if rules.in_grammar:
        return AnswerStart()
    is_open = reasoning_format is not None and _is_open(reasoning_format, prompt, rules.continued)
    return AnswerStart(is_open, "" if rules.continued else _last_marker(reasoning_format, calls, prompt))


def _last_marker(reasoning_format: ReasoningFormat | None, calls: CallFormat | None, prompt: str) -> str:
    """Return the marker before a message or an answer with which a prompt ends, or ""."""
    markers = (
        *(calls.headers if calls else ()),
        *((*reasoning_format.headers, *reasoning_format.answer_begins) if reasoning_format else ()),
    )
    end = prompt.rstrip()
    return next((marker for marker in markers if end.endswith(marker)), "")


def _is_open(reasoning_format: ReasoningFormat, prompt: str, continued: str) -> bool:
    """Return whether a prompt ends within the reasoning: with its begin marker, or with an answer that it is open in.

    Other markers of the prompt may be in texts of users.
    """
    end = prompt.rstrip()
    if reasoning_format.is_open(continued) or end.endswith(reasoning_format.begins):
        return True
    return reasoning_format.implicit and not continued and not end.endswith(reasoning_format.ends)
