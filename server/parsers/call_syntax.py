"""Parsers of blocks of tool calls, one for each syntax. `call_formats` says which model writes which.

`tag_syntax` has the parsers of tags. A parser returns the calls of a block, or raises one of `NO_CALLS`. It takes time in
proportion to the block.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from .pieces import Call
from .values import Functions, constant, decode_json, dump_json, load_json, typed_value

Parse = Callable[[str, Functions], list[Call]]
NO_CALLS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError, MemoryError)
_NAME = re.compile(r"[^\W\d][\w.:/-]*")  # of an unknown function


def make_call(name: str, arguments: Any, functions: Functions) -> Call:
    """Return a call. Raise ValueError if its name is none, or its arguments are no object."""
    name = function_name(name, functions)
    if not (name in functions or _NAME.fullmatch(name)) or not isinstance(arguments, dict):
        raise ValueError("a call has no name or no arguments")
    return Call(name, dump_json(arguments))


def function_name(name: str, functions: Functions) -> str:
    """Return a name without quotes and without a namespace that the request did not give it."""
    name = name.strip().strip('"')
    return name if name in functions else name.removeprefix("functions.")


_ARGUMENTS = ("arguments", "parameters", "args")


def _call_of(value: Any, functions: Functions, needs_arguments: bool = False) -> Call:
    """Return the call in an object with a name and arguments, under any of their names."""
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    key = next((key for key in _ARGUMENTS if key in value), None)
    if key is None and needs_arguments:
        raise ValueError("an object has no arguments")
    arguments: Any = value.get(key)
    if isinstance(arguments, str):
        arguments = load_json(arguments.strip() or "{}")
    name = value["name"] if "name" in value else value["tool_name"]
    return make_call(name, {} if arguments is None else arguments, functions)


def parse_json(
    text: str,
    functions: Functions = {},  # noqa: B006
    separators: str = " \n\r\t,;",
    needs_arguments: bool = False,
    marker: str = "",
) -> list[Call]:
    """Parse JSON values one after another: objects with a name and arguments, or lists of them.

    A `marker` may stand before each of them.
    """
    calls: list[Call] = []
    text, position = text.strip(), 0
    while position < len(text):
        if marker and text.startswith(marker, position):
            position += len(marker)
        else:
            value, position = decode_json(text, position)
            entries = value if isinstance(value, list) else [value]
            calls += [_call_of(entry, functions, needs_arguments) for entry in entries]
        while text[position : position + 1] in tuple(separators):
            position += 1
    if not calls:
        raise ValueError("there are no calls")
    return calls


def parse_json_block(text: str, functions: Functions) -> list[Call]:
    """Parse a block of JSON as `parse_json` does; each object must have arguments."""
    return parse_json(text, functions, needs_arguments=True)


def parse_open_list(text: str, functions: Functions) -> list[Call]:
    """Parse JSON as `parse_json` does; the bracket of a list may be a part of the marker before it."""
    is_open = text.rstrip().endswith("]") and not text.lstrip().startswith("[")
    return parse_json("[" + text if is_open else text, functions)


def parse_arguments(name: str, text: str, functions: Functions) -> Call:
    """Return the call of a function with arguments as JSON text."""
    return make_call(name, load_json(text.strip() or "{}"), functions)


def parse_named(text: str, functions: Functions) -> list[Call]:
    """Parse a JSON list of `{NAME: ARGUMENTS}` (Apertus)."""
    return [make_call(name, arguments, functions) for value in load_json(text) for name, arguments in value.items()]


def parse_actions(text: str, functions: Functions) -> list[Call]:
    """Parse JSON in which the function `directly_answer` stands for no call (Command R)."""
    return [call for call in parse_json(text, functions) if call.name not in ("directly_answer", "directly-answer")]


def split_json(marker: str) -> Parse:
    """Return a parser of JSON values with markers between them."""
    return lambda text, functions: parse_json(text, functions, marker=marker)


def parse_bracketed(text: str, functions: Functions) -> list[Call]:
    """Parse `[{"name": ..., "arguments": {...}}]`, or `NAME[ARGS]{...}`, which the next marker may follow."""
    if re.match(r"\s*(\[\s*)?\{", text):
        return parse_json(text, functions)
    calls, position = list[Call](), 0
    while position < len(text) or not calls:
        brace = text.find("{", position)
        value, end = decode_json(text, len(text) if brace < 0 else brace)
        name = re.sub(r"\[(ARGS|CALL_ID)\].*", "", text[position:brace].strip(), flags=re.S)
        calls.append(make_call(name, value, functions))
        rest = re.compile(r"\s*(\[TOOL_CALLS\]|$)").match(text, end)
        if rest is None:
            raise ValueError("a call is followed by text")
        position = rest.end()
    return calls


def parse_pythonic(text: str, functions: Functions) -> list[Call]:
    """Parse calls as Python writes them: `[f(a=1), g(b="x")]`, or one on each line. JSON's words for constants are known."""
    text = text.strip()
    if text.startswith(("{", "[{")):
        return parse_json(text, functions)
    if not text.startswith("["):
        text = "[" + ",".join(_lines(text)) + "]"
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.List) or not node.elts:
        raise ValueError("there is no list of calls")
    return [_python_call(element, functions) for element in node.elts]


def _lines(text: str) -> Iterator[str]:
    """Yield the calls of a text with one on each line; a call may go over several lines."""
    open_lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        if not open_lines and not line.strip():
            continue
        open_lines.append(line)
        depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
        if depth <= 0:
            yield "\n".join(open_lines).strip().rstrip(",")
            open_lines, depth = [], 0
    if open_lines:
        yield "\n".join(open_lines)


def _python_call(node: ast.expr, functions: Functions) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("arguments need names")
    arguments = {_keyword(keyword): constant(keyword.value) for keyword in node.keywords}
    return make_call(ast.unparse(node.func), arguments, functions)


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("arguments need names")
    return keyword.arg


def keyed(quote: str) -> Parse:
    """Return a parser of `call:NAME{KEY:VALUE,...}`, where the token `quote` is around texts."""
    text_pattern = f"{re.escape(quote)}(.*?){re.escape(quote)}"
    token = re.compile(rf"\s*(?:{text_pattern}|([{{}}\[\]:,])|([^{{}}\[\]:,\s][^{{}}\[\]:,]*))", re.S)

    def parse(text: str, functions: Functions) -> list[Call]:
        calls: list[Call] = []
        position, end = 0, len(text.rstrip())
        while position < end or not calls:
            match = _KEYED_CALL.match(text, position)
            if match is None:
                raise ValueError("there is no call")
            arguments, position = _keyed_object(text, match.end(), token)
            calls.append(make_call(match[1], arguments, functions))
        return calls

    return parse


_KEYED_CALL = re.compile(r"\s*(?:,\s*)?call:\s*([^\s{]+)\s*\{")  # no two neighbours match whitespace


def _keyed_object(text: str, position: int, token: re.Pattern[str]) -> tuple[dict[str, Any], int]:
    """Return the object after its opening brace, and where it ends."""
    values: dict[str, Any] = {}
    while True:
        key, position = _keyed_token(text, position, token)
        if key == ("}", True):
            return values, position
        if key == (",", True) and values:
            continue
        colon, position = _keyed_token(text, position, token)
        if key[1] or colon != (":", True):
            raise ValueError("a key or a colon is missing")
        values[str(key[0])], position = _keyed_value(text, position, token)


def _keyed_value(text: str, position: int, token: re.Pattern[str]) -> tuple[Any, int]:
    (value, is_sign), position = _keyed_token(text, position, token, is_value=True)
    if not is_sign:
        return value, position
    if value == "{":
        return _keyed_object(text, position, token)
    if value != "[":
        raise ValueError("a value is missing")
    entries: list[Any] = []
    while True:
        (sign, ends), after = _keyed_token(text, position, token)
        if ends and sign == "]":
            return entries, after
        if ends and sign == ",":
            position = after
            continue
        entry, position = _keyed_value(text, position, token)
        entries.append(entry)


def _keyed_token(text: str, position: int, token: re.Pattern[str], is_value: bool = False) -> tuple[tuple[Any, bool], int]:
    """Return the next text, sign or bare word: (it, whether it is a sign), and where it ends. A bare word may be JSON."""
    match = token.match(text, position)
    if match is None:
        raise ValueError("the call is not complete")
    if match[1] is not None:
        return (match[1], False), match.end()
    if match[2] is not None:
        return (match[2], True), match.end()
    return (typed_value(match[3].strip(), None) if is_value else match[3].strip(), False), match.end()
