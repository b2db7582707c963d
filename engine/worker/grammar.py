"""Answers of a promised form: a grammar's state per sequence, and which tokens it allows next. Knows no logits and no model.

The grammars are llguidance's, which is imported when the first request asks for one.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from ..mm.errors import InputError
from ..processors.text import Tokenizer

_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_WHITESPACE: dict[str, dict[str, object]] = {
    "compact": {"whitespace_flexible": False},
    "flexible": {"whitespace_pattern": r"[ \n\r\t]{1,40}"},  # without an end, a model can fill its answer with it
}
_KEPT = 64  # compiled grammars
_WORD = 32  # tokens of one word of a mask


@dataclass(frozen=True)
class StructuredOutputs:
    """What form an answer must have; exactly one of the first five. Names as in vLLM's StructuredOutputsParams.

    Args:
        json: a JSON schema as a mapping or as text, or a pydantic model class; kept as text.
        regex: the whole answer matches it (Rust's syntax, no look-around).
        choice: the answer is one of these texts.
        grammar: a context-free grammar in llguidance's dialect of Lark; `start` is its first rule.
        json_object: any JSON object.
        whitespace: of JSON: "compact", none between its parts; "flexible", up to 40 characters between any two.

    Raises:
        InputError: none or several forms, or one of another type. What a form means is checked when a request is made.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace: str = "compact"

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise InputError(f"structured_outputs takes exactly one of {', '.join(_FORMS)}; found {found}")
        if self.whitespace not in _WHITESPACE:
            raise InputError(f'structured_outputs.whitespace={self.whitespace!r} must be "compact" or "flexible"')
        if self.json_object not in (True, False):
            raise InputError(f"structured_outputs.json_object={self.json_object!r} must be True or False")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise InputError(f"structured_outputs.{name}={value!r} must be a text that is not empty")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @property
    def form(self) -> str:
        """Name of the one that was given."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))


def _choices(given: object) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise InputError(f"structured_outputs.choice={given!r} must be a list of texts")
    for text in given:
        if not isinstance(text, str) or not text:
            raise InputError(f"structured_outputs.choice holds {text!r}; every choice must be a text that is not empty")
    return tuple(given)


def _schema_text(given: Any) -> str:
    """The schema as JSON, in the order it was given: objects are written in the order of their properties."""
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if isinstance(given, Mapping):
        try:
            return json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"structured_outputs.json is no JSON schema: {error}") from None
    if not isinstance(given, str):
        raise InputError(f"structured_outputs.json={given!r} must be a schema, its text, or a pydantic model class")
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InputError(f"structured_outputs.json is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InputError(f"structured_outputs.json={given!r} must be a JSON object")
    return given


class Grammar:
    """The state of one answer. It follows the answer's tokens, which the caller keeps."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size, self._words, self._read = matcher, size, -(-size // _WORD), 0

    def follow(self, token_ids: Sequence[int], turn_start: int) -> None:
        """Read the answer's tokens that are new since the last call. InputError when they are not of the grammar."""
        new = list(token_ids[turn_start + self._read :])
        self._read += len(new)
        if new and not self._matcher.consume_tokens(new):
            raise self._error()

    def roll_back(self, num_tokens: int) -> None:
        """The answer was cut to its first `num_tokens`."""
        if num_tokens < self._read:
            done = self._matcher.rollback(self._read - num_tokens)
            self._read = num_tokens if done else 0
            if not done:
                self._matcher.reset()

    @property
    def complete(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self, end_ids: Sequence[int], may_end: bool, vocab: int) -> tuple[np.ndarray, bool]:
        """Which tokens may come next, bool `[vocab]`, and whether the answer has to end, whatever `may_end` says.

        Args:
            end_ids: tokens that end the answer: allowed where the grammar is complete and `may_end`, or nothing else is.
            vocab: logits of a row, which may be more than there are tokens; those are never allowed.
        """
        words = np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._error()
        allowed = np.zeros(vocab, dtype=bool)
        known = min(vocab, self._size)
        allowed[:known] = np.unpackbits(words.view(np.uint8), count=known, bitorder="little").view(bool)
        allowed[list(end_ids)] = False
        complete = self.complete
        must_end = complete and not allowed.any()
        allowed[list(end_ids)] = must_end or (complete and may_end)
        return allowed, must_end

    def _error(self) -> InputError:
        return InputError(f"the grammar cannot go on: {_line(self._matcher.get_error())}")


class GrammarFactory:
    """Compiles the grammars of one tokenizer and keeps the latest. Thread-safe; the first use reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._lock = Lock()

    def check(self, wanted: StructuredOutputs) -> None:
        """InputError when no grammar can be made of it; the message names the form and what is wrong with it."""
        self._compiled(wanted)

    def make(self, wanted: StructuredOutputs) -> Grammar:
        """The state at the beginning of an answer. InputError as `check`."""
        compiled = self._compiled(wanted)
        return Grammar(compiled.deep_copy(), self._vocabulary.vocab_size)

    def _compiled(self, wanted: StructuredOutputs) -> Any:
        with self._lock:
            found = self._kept.get(wanted)
            if found is None:
                found = self._compile(wanted)
                self._kept[wanted] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(wanted)
        return found

    def _compile(self, wanted: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._vocabulary, _source(wanted), log_level=0)
        except UnicodeError as error:
            raise InputError(f"structured_outputs.{wanted.form} cannot be used: {error}") from None
        first = matcher.deep_copy()  # what no answer can begin is found by asking for the first token only
        if not first.is_error():
            first.compute_bitmask()
        if first.is_error():
            raise InputError(f"structured_outputs.{wanted.form} cannot be used: {_line(first.get_error())}")
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(*self._tokenizer.grammar_vocabulary())
        except ValueError as error:
            raise InputError(f"structured_outputs cannot be used with this checkpoint's tokenizer: {error}") from None


def _source(wanted: StructuredOutputs) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher

    make: Any = LLMatcher
    if wanted.form in ("json", "json_object"):
        text = make.grammar_from_json_schema(wanted.json or '{"type": "object"}', overrides=_WHITESPACE[wanted.whitespace])
    elif wanted.form == "regex":
        text = make.grammar_from_regex(wanted.regex)
    elif wanted.choice:  # one word of a grammar: as rules, the choices would be as many as the parser has states
        text = make.grammar_from_regex("|".join(map(re.escape, wanted.choice)))
    else:
        text = make.grammar_from_lark(wanted.grammar)
    return str(text)


def _line(text: str) -> str:
    """The first sentence of llguidance's message, on one line."""
    words = " ".join(text.partition("<state>")[0].split())
    return "no answer has this form" if words == "NoExtensionBias" else words
