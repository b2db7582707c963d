"""How models write tool calls. Each format has the marker before its calls, that after them, and a parser of what is between.

Sources: the chat templates of the published models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pieces import Call

Functions = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters."""
_decode = json.JSONDecoder(strict=False).raw_decode  # models write line breaks into strings


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls.

    Args:
        begin, end: markers around a block of calls; without an end, the block lasts until the end of the answer.
        parse: returns the calls of a block. It raises ValueError, KeyError, TypeError or AttributeError for another text.
        bare: a block may also begin without a marker, if the answer begins with "{".
    """

    begin: str
    end: str | None
    parse: Callable[[str, Functions], Sequence[Call]]
    bare: bool = False


def _call(value: Any) -> Call:
    """Return the call in an object with a name and arguments, under any of their names."""
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    arguments = value["arguments"] if "arguments" in value else value.get("parameters", {})
    if not isinstance(value["name"], str) or not value["name"]:
        raise ValueError("a call has no name")
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _json_calls(text: str, separators: str) -> list[Call]:
    """Return the calls of JSON values one after another; each may be a list."""
    calls: list[Call] = []
    text, place = text.strip(), 0
    while place < len(text):
        value, place = _decode(text, place)
        calls += map(_call, value if isinstance(value, list) else [value])
        while text[place : place + 1] in tuple(separators):
            place += 1
    return calls


def _fields(text: str, begin: str, middle: str, end: str) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs in any number of `begin KEY middle VALUE end`, and the other text.

    It takes time in proportion to the text; a regular expression would take its cube.
    """
    *blocks, other = text.split(end)
    pairs = []
    for block in blocks:
        before, _, field = block.partition(begin)
        key, found, value = field.partition(middle)
        if not found:
            raise ValueError(f"{begin} or {middle} is missing")
        pairs.append((key, value))
        other += before
    return pairs, other


def _tagged(text: str, functions: Functions) -> list[Call]:
    """Parse JSON as `_json_calls`, `<function=NAME><parameter=KEY>...`, or `NAME<arg_key>KEY</arg_key><arg_value>...`."""
    text = text.strip()
    if text.startswith(("{", "[")):
        return _json_calls(text, " \n")
    if found := re.match(r"<function=([^>\n]+)>", text):
        name, (pairs, _) = found[1].strip(), _fields(text, "<parameter=", ">", "</parameter>")
        pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
    else:
        name, (pairs, _) = text.partition("<arg_key>")[0].strip(), _fields(text, "<arg_key>", "</arg_key>", "</arg_value>")
        pairs = [(key, value.lstrip().removeprefix("<arg_value>")) for key, value in pairs]
    if not re.fullmatch(r"[^\W\d][\w.-]*", name):
        raise ValueError("a call has no name")
    properties = functions.get(name, {}).get("properties", {})
    arguments = {key.strip(): _value(value, properties.get(key.strip())) for key, value in pairs}
    return [Call(name, json.dumps(arguments, ensure_ascii=False))]


def _value(text: str, schema: Any) -> Any:
    """Return a value that is written without quotes: a text if the schema says so or it is no JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bracketed(text: str, functions: Functions) -> list[Call]:
    """Parse `[{"name": ..., "arguments": {...}}]`, or `NAME[ARGS]{...}`, which the next marker may follow."""
    if text.lstrip().startswith(("[{", "{", "[ {")):
        return _json_calls(text, " \n,;")
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, brace, rest = part.partition("{")
        value, end = _decode(brace + rest)
        name = re.sub(r"\[(ARGS|CALL_ID)\].*", "", name.strip(), flags=re.S)
        if not name or (brace + rest)[end:].strip():
            raise ValueError("a call has no name, or is followed by text")
        calls.append(Call(name, json.dumps(value, ensure_ascii=False)))
    return calls


def _sections(text: str, functions: Functions) -> list[Call]:
    """Parse `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, any number of times."""
    pairs, other = _fields(text, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    if not pairs or other.strip():
        raise ValueError("there are no calls, or other text")
    names = [re.sub(r"^functions\.|:\d+$", "", name.strip()) for name, _ in pairs]
    return [
        _call({"name": name, "arguments": json.loads(value, strict=False)})
        for name, (_, value) in zip(names, pairs, strict=True)
    ]


FORMATS = {
    "sections": CallFormat("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _sections),
    "bracketed": CallFormat("[TOOL_CALLS]", None, _bracketed),
    "tagged": CallFormat("<tool_call>", "</tool_call>", _tagged),
    "python_tag": CallFormat("<|python_tag|>", None, lambda text, _: _json_calls(text, " \n;"), bare=True),
}


def find_format(template: str) -> CallFormat | None:
    """Return the format whose marker a chat template mentions."""
    return next((one for one in FORMATS.values() if one.begin in template), None)
