"""Fields of messages, tools and choices of tools, which are objects within bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...mm.errors import InputError
from .body import check_fields

_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_EMPTY = ("annotations", "refusal", "audio", "function_call")
"""Fields of OpenAI's answers, which clients send back. They are accepted without a value."""
_CALL = ("id", "type", "function", "index")
FUNCTION_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


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
        given = {name: value for name, value in message.items() if name not in _EMPTY or value not in (None, [], "")}
        check_fields({name: value for name, value in given.items() if name not in read}, _MESSAGE, where, where)
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                place = f"{where}.tool_calls[{number}]"
                check_fields(call, _CALL, place, place)
                function = call.get("function")
                if isinstance(function, Mapping):
                    check_fields(function, ("name", "arguments"), f"{place}.function", f"{place}.function")


def read_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parameters of each function of `tools` by its name.

    Raises:
        InputError: a tool has another form.
    """
    found = {}
    for index, tool in enumerate(tools):
        where, given = f"tools[{index}]", tool.get("function")
        function: dict[str, Any] = given if isinstance(given, dict) else {}
        name, parameters = function.get("name"), function.get("parameters") or {}
        if tool.get("type") != "function" or not (isinstance(name, str) and name) or not isinstance(parameters, dict):
            raise InputError(f"{where} must be {FUNCTION_FORM}", param="tools")
        check_fields(tool, ("type", "function"), where, "tools")
        check_fields(function, ("name", "description", "parameters", "strict"), f"{where}.function", "tools")
        found[name] = parameters
    return found


@lru_cache(maxsize=8)
def _words(template: str) -> frozenset[str]:
    """Return the words of a template, among them the names of the fields that it reads."""
    return frozenset(re.findall(r"[^\W\d]\w*", template))
