"""Names of the fields of messages: an unknown one is an error, because a template would ignore it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .errors import InputError, equals_one_of, hint, short_repr

_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_EMPTY = ("annotations", "refusal", "audio", "function_call")
"""Fields of OpenAI's answers, which clients send back. They are accepted without a value."""
_CALL = ("id", "type", "function", "index")
_FUNCTION = ("name", "arguments")


def check_fields(values: Mapping[Any, object], allowed: Collection[str], where: str, param: str) -> None:
    """Raise InputError for a field with a value that is not known. `where`: the object's place in the body."""
    for name, value in values.items():
        if value is not None and name not in allowed:
            raise InputError(
                f"unknown field {short_repr(name, 100)} of {where}; {hint(name, allowed)}",
                code="unknown_name",
                value=name,
                param=param,
            )


def check_messages(messages: Sequence[Mapping[str, Any]], template: str | None) -> None:
    """Check the names of the fields of messages and of their tool calls. Parts are checked where they are read.

    Args:
        template: the chat template. A field that it names is known.

    Raises:
        InputError: a field is unknown.
    """
    read = _words(template or "")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        empty = {name for name in _EMPTY if name in message and equals_one_of(message[name], (None, [], ""))}
        values = {name: value for name, value in message.items() if name not in empty and name not in read}
        check_fields(values, _MESSAGE, where, where)
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                path = f"{where}.tool_calls[{number}]"
                check_fields(call, _CALL if "function" in call else (*_CALL, *_FUNCTION), path, path)
                function = call.get("function")
                if isinstance(function, Mapping):
                    check_fields(function, _FUNCTION, f"{path}.function", f"{path}.function")


def drop_unknown_fields(messages: Sequence[Mapping[str, Any]], template: str | None) -> tuple[list[dict[str, Any]], int]:
    """Return messages without their unknown fields, and how many there were. Tool calls stay as they are."""
    fields = {*_MESSAGE, *_EMPTY, *_words(template or "")}
    kept = [{name: value for name, value in message.items() if name in fields} for message in messages]
    return kept, sum(len(message) for message in messages) - sum(len(message) for message in kept)


@lru_cache(maxsize=8)
def _words(template: str) -> frozenset[str]:
    """Return the words of a template, among them the names of the fields that it reads."""
    return frozenset(re.findall(r"[^\W\d]\w*", template))
