"""Tools of chat requests: functions, and custom tools, whose input is plain text.

Chat templates and models know functions only, so a custom tool is shown to them as a function with the one argument `input`.
Source: the types `ChatCompletionCustomTool` and `ChatCompletionMessageCustomToolCall` of the `openai` package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...callers.errors import InputError, hint, short_repr
from ...callers.message_fields import check_fields
from ...engine.structured_outputs import StructuredOutputsParams
from ..parsers.values import joined_surrogates
from .body import Refused, check_refused

INPUT = "input"
"""The argument that holds the text of a custom tool's call."""
_FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
_CUSTOM = '{"type": "custom", "custom": {"name": ...}}'
_GRAMMAR = '{"type": "grammar", "grammar": {"syntax": "lark" or "regex", "definition": ...}}, or {"type": "text"}'
REFUSED_IN_TOOLS: Refused = {
    "allowed_callers": ((["direct"],), "the model alone calls tools"),
    "async": ((False,), "a call is answered by an item of the next request"),
    "defer_loading": ((False,), "there is no search for tools; the template shows all of them"),
    "output_schema": ((), "chat templates show no form of a tool's output; describe it in description"),
}


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call.

    Args:
        parameters: JSON schema of its arguments.
        shown: the tool as chat templates take it, a function.
        is_custom: its calls have plain text.
        grammar: the format of that text, or None for any.
    """

    name: str
    parameters: dict[str, Any]
    shown: Mapping[str, Any]
    is_custom: bool = False
    grammar: StructuredOutputsParams | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of a request to /v1/chat/completions.

    Raises:
        InputError: a tool has another form.
    """
    read = [
        _read_custom(tool, index) if tool.get("type") == "custom" else _read(tool, index) for index, tool in enumerate(tools)
    ]
    names: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in names:
            raise InputError(f"tools[{index}] has the name {short_repr(tool.name)} of another tool; rename one", param="tools")
        names.add(tool.name)
    return read


def _read(tool: Mapping[str, Any], index: int) -> Tool:
    where, value = f"tools[{index}]", tool.get("function")
    function: dict[str, Any] = value if isinstance(value, dict) else {}
    name, parameters = function.get("name"), function.get("parameters") or {}
    if tool.get("type") != "function" or not (isinstance(name, str) and name) or not isinstance(parameters, dict):
        raise InputError(f"{where} must be {_FUNCTION}, or {_CUSTOM}", code="invalid_value", param="tools")
    check_fields(tool, ("type", "function"), where, "tools")
    check_fields(function, ("name", "description", "parameters", "strict"), f"{where}.function", "tools")
    return Tool(name, parameters, tool)


def _read_custom(tool: Mapping[str, Any], index: int) -> Tool:
    where, value = f"tools[{index}]", tool.get("custom")
    custom: dict[str, Any] = value if isinstance(value, dict) else {}
    name, description = custom.get("name"), custom.get("description")
    if not (isinstance(name, str) and name) or not isinstance(description, str | None):
        raise InputError(f"{where} must be {_CUSTOM}", code="invalid_value", param="tools")
    check_fields(tool, ("type", "custom"), where, "tools")
    check_fields(custom, ("name", "description", "format"), f"{where}.custom", "tools")
    syntax, definition = _read_grammar(custom.get("format"), where)
    rule = f"{INPUT} must match this {syntax} grammar:\n{definition}" if syntax else ""
    text: dict[str, Any] = {"type": "string", "description": "the whole input of the tool, as plain text"}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    about = "\n\n".join(part for part in (description, rule) if part)
    shown = {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
    grammar = None
    if syntax:
        grammar = (
            StructuredOutputsParams(regex=definition) if syntax == "regex" else StructuredOutputsParams(grammar=definition)
        )
    return Tool(name, schema, shown, True, grammar)


def _read_grammar(tool_format: Any, where: str) -> tuple[str, str]:
    """Return syntax and definition of a custom tool's format, both empty for plain text."""
    kind = tool_format.get("type") if isinstance(tool_format, dict) else None
    if tool_format is None or kind == "text":
        check_fields(tool_format or {}, ("type",), f"{where}.format", "tools")
        return "", ""
    grammar: Any = tool_format.get("grammar") if isinstance(tool_format, dict) else None
    syntax, definition = (grammar.get(key) for key in ("syntax", "definition")) if isinstance(grammar, dict) else (None, None)
    if kind != "grammar" or syntax not in ("lark", "regex") or not (isinstance(definition, str) and definition):
        raise InputError(f"{where}.format is {short_repr(tool_format)}; give {_GRAMMAR}", param="tools")
    check_fields(tool_format, ("type", "grammar"), f"{where}.format", "tools")
    check_fields(grammar or {}, ("syntax", "definition"), f"{where}.format.grammar", "tools")
    return str(syntax), definition


def named_tool(choice: Mapping[str, Any], where: str) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": ...}}` or its form for custom tools, else None.

    Raises:
        InputError: it has an unknown field.
    """
    kind = choice.get("type")
    value = choice.get(kind) if kind in ("function", "custom") else None
    name = value.get("name") if isinstance(value, dict) else None
    if not (isinstance(name, str) and name):
        return None
    check_fields(choice, ("type", str(kind)), where, "tool_choice")
    check_fields(value or {}, ("name",), f"{where}.{kind}", "tool_choice")
    return name


def as_template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls of custom tools are calls of functions, as templates show both.

    Raises:
        InputError: such a call has another form.
    """
    return [_as_template_message(message, index) for index, message in enumerate(messages)]


def _as_template_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_as_function(call, index, number) for number, call in enumerate(calls)]}


def _as_function(call: Any, message: int, number: int) -> Any:
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    where = f"messages[{message}].tool_calls[{number}]"
    custom = call.get("custom")
    name, text = (custom.get(key) for key in ("name", INPUT)) if isinstance(custom, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise InputError(
            '<<param>> must be {"type": "custom", "custom": {"name": ..., "input": ...}}', code="invalid_value", param=where
        )
    check_fields(call, ("id", "type", "custom", "index"), where, where)
    check_fields(custom or {}, ("name", INPUT), f"{where}.custom", where)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": as_arguments(text)}}


def as_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """Return the text in the arguments of the function that stands for a custom tool.

    Arguments that are cut off give the text up to there; those of another form are the text themselves.
    """
    if f'{{"{INPUT}":"'.startswith("".join(arguments.split())):
        return ""
    text = _without_cut_escape(arguments)
    for ending in ("", "}", '"}'):
        try:
            value = json.loads(text + ending, strict=False)
        except (ValueError, RecursionError):
            continue
        result = value.get(INPUT) if isinstance(value, dict) else None
        if not isinstance(result, str):
            return arguments
        return joined_surrogates(re.sub("[\ud800-\udbff]\\Z", "", result) if ending == '"}' else result)
    return arguments


def _without_cut_escape(text: str) -> str:
    """Return JSON text without an escape at its end that is not complete."""
    position = text.rfind("\\", max(0, len(text) - 5))
    if position < 0 or not re.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", text[position:]):
        return text
    before = text[:position]
    num_backslashes = len(before) - len(before.rstrip("\\"))
    return text if num_backslashes % 2 else before  # a pair of backslashes is an escape of its own


def chat_tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a tool of /v1/responses in the form of /v1/chat/completions.

    Raises:
        InputError: it has another form, or the server would have to run it.
    """
    where, kind, name = f"tools[{index}]", tool.get("type"), tool.get("name")
    if isinstance(kind, str) and kind in _SERVER_TOOLS:
        reason = "leave it out, or offer a function of your own that does it"
        raise InputError(
            f"{where} has the type {kind}: {_SERVER_TOOLS[kind]}; {reason}", code="unsupported", param="tools", value=kind
        )
    if kind not in _RESPONSES_KEYS or not (isinstance(name, str) and name):
        shape = '{"type": "function", "name": ..., "parameters": {...}} or {"type": "custom", "name": ...}'
        raise InputError(f"{where} must be {shape}; the server runs no tools of its own", code="invalid_value", param="tools")
    keys = _RESPONSES_KEYS[str(kind)]
    check_refused(tool, REFUSED_IN_TOOLS, where, "tools")
    declared = {key: value for key, value in tool.items() if key not in REFUSED_IN_TOOLS}
    check_fields(declared, ("type", *keys), where, "tools")
    fields = {key: tool[key] for key in keys if tool.get(key) is not None}
    if not isinstance(fields.get("parameters", {}), dict):
        raise InputError(f"{where}.parameters must be a JSON schema", code="invalid_value", param="tools")
    rule = fields.get("format")
    if isinstance(rule, dict) and rule.get("type") == "grammar":
        fields["format"] = {"type": "grammar", "grammar": {key: value for key, value in rule.items() if key != "type"}}
    return {"type": kind, str(kind): fields}


def chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a tool_choice of /v1/responses in the form of /v1/chat/completions.

    Raises:
        InputError: it has another form, or names a tool that the server would have to run.
    """
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        check_fields(choice, ("type", "mode", "tools"), "tool_choice", "tool_choice")
        tools: Any = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InputError(
                "<<param>>.tools must be a list of tools by type and name", code="invalid_value", param="tool_choice"
            )
        allowed = {"mode": choice.get("mode"), "tools": [_nested(tool) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _nested(choice)


def _nested(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind: Any = choice.get("type", "function")
    if isinstance(kind, str) and kind in _SERVER_TOOLS:
        raise InputError(
            f"<<param>> names the type {kind}: {_SERVER_TOOLS[kind]}", code="unsupported", param="tool_choice", value=kind
        )
    if kind not in ("function", "custom"):
        raise InputError(
            f"<<param>> has the type {short_repr(kind)}; {hint(kind, _CHOICES)}",
            code="unknown_name",
            value=kind,
            param="tool_choice",
        )
    check_fields(choice, ("type", "name"), "tool_choice", "tool_choice")
    return {"type": kind, kind: {"name": choice.get("name")}}


_CHOICES = ("function", "custom", "allowed_tools")
_RESPONSES_KEYS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
_SEARCH = "there is no web search"
_SERVER_TOOLS = {
    "web_search": _SEARCH,
    "web_search_2025_08_26": _SEARCH,
    "web_search_preview": _SEARCH,
    "web_search_preview_2025_03_11": _SEARCH,
    "file_search": "there is no file search",
    "code_interpreter": "the server runs no code",
    "programmatic_tool_calling": "the server runs no code",
    "computer": "the server drives no computer",
    "computer_use_preview": "the server drives no computer",
    "image_generation": "answers are text",
    "mcp": "the server calls no other servers",
    "local_shell": "there is no tool of this form",
    "shell": "there is no tool of this form",
    "apply_patch": "there is no tool of this form",
    "namespace": "tools have no namespaces; offer its functions one by one",
    "tool_search": "there is no search for tools; offer all of them",
}
"""Types of tools that OpenAI's servers know beside functions and custom tools, and why they cannot be offered here."""
