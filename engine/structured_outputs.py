"""Formats that answers can be constrained to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from ..callers.errors import InputError, check_utf8, error_reason, hints_at_arguments
from ..callers.plain import builtin_copy
from .param_checks import UnusedParams, check_strings, check_unused, param_error

_FORMATS = ("json", "regex", "choice", "grammar", "json_object")
_WHITESPACES = ("compact", "flexible")
_UNUSED_FORMATS: UnusedParams = {
    "disable_additional_properties": ((False,), 'set "additionalProperties": false in the schema'),
    "whitespace_pattern": ((None,), 'give whitespace="compact" or "flexible"'),
    "structural_tag": ((None,), "give a grammar"),
    "backend": ((None,), "llguidance compiles every format"),
}


@hints_at_arguments
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constrains the answer to a format. Exactly one of the first five arguments must be given.

    Args:
        json: a JSON schema as a mapping or string, or a pydantic model class. It is converted to a string.
        regex: a regular expression that the whole answer matches, in Rust's syntax without look-around.
        choice: a list of strings; the answer is one of them.
        grammar: a context-free grammar in llguidance's variant of Lark. Its first rule is `start`.
        json_object: if True, the answer is any JSON object.
        whitespace: whitespace in JSON: "compact" for none, "flexible" for up to 40 characters between two tokens.
        disable_any_whitespace: True is `whitespace="compact"`, False is "flexible".

    Raises:
        InputError: no format or several formats are given, or one has a wrong type. Whether a format is valid is checked when
            a request uses it.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace: str = "compact"
    disable_any_whitespace: InitVar[bool | None] = None
    disable_additional_properties: InitVar[bool] = False
    whitespace_pattern: InitVar[str | None] = None
    structural_tag: InitVar[str | None] = None
    backend: InitVar[str | None] = None

    def __post_init__(self, disable_any_whitespace: bool | None, *unused: object) -> None:
        for name, value in zip(_UNUSED_FORMATS, unused, strict=True):
            check_unused(_UNUSED_FORMATS, name, value)
        for name in ("regex", "choice", "grammar", "whitespace"):
            object.__setattr__(self, name, builtin_copy(getattr(self, name), f"structured_outputs.{name}"))
        if disable_any_whitespace is not None:
            object.__setattr__(self, "whitespace", "compact" if disable_any_whitespace else "flexible")
        formats = self._given()
        if len(formats) != 1:
            given_formats = ", ".join(formats) or "none"
            reason = f"<<param>> takes exactly one of {', '.join(_FORMATS)}; found {given_formats}"
            raise InputError(reason, param="structured_outputs")
        if not isinstance(self.whitespace, str) or self.whitespace not in _WHITESPACES:
            raise param_error("structured_outputs.whitespace", self.whitespace, 'must be "compact" or "flexible"')
        if not isinstance(self.json_object, bool):
            raise param_error("structured_outputs.json_object", self.json_object, "must be True or False")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise param_error(f"structured_outputs.{name}", value, "must be a non-empty string")
            check_utf8(value or "", f"structured_outputs.{name}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _check_choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @property
    def form(self) -> str:
        """Name of the argument that was given, such as "json"."""
        return self._given()[0]

    @property
    def num_chars(self) -> int:
        """Number of characters of the format."""
        grammar = getattr(self, self.form)
        return sum(map(len, grammar)) + len(grammar) if isinstance(grammar, tuple) else len(str(grammar))

    def _given(self) -> list[str]:
        return [name for name in _FORMATS if getattr(self, name) is not None and getattr(self, name) is not False]


GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


def _check_choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise param_error("structured_outputs.choice", value, "must be a list of strings")
    if not len(value):
        raise param_error("structured_outputs.choice", value, "is empty; give one string or more")
    return check_strings("structured_outputs.choice", builtin_copy(tuple(value), "structured_outputs.choice"))


def _schema_text(schema: Any) -> str:
    """Return a schema as JSON text. The order of keys is kept: it is the order of the properties in answers."""
    param = "structured_outputs.json"
    try:
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, Mapping):
            return json.dumps(schema)
    except Exception as error:  # raised by the caller's class, too
        raise InputError(f"<<param>> is not a JSON schema: {error_reason(error)}", param=param) from None
    if not isinstance(schema, str):
        raise param_error(param, schema, "must be a schema, its text, or a pydantic model class")
    check_utf8(schema, param)
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InputError(f"<<param>> is not JSON: {error}", code="invalid_value", param=param) from None
    if not isinstance(parsed, dict):
        raise param_error(param, schema, "must be a JSON object")
    return schema
