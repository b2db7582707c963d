"""The input items of /v1/responses as chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...mm.errors import InputError, hint, short_repr
from ...mm.message_fields import check_fields

_Item = Mapping[str, Any]


def read_items(items: Sequence[_Item], before: int = 0) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return chat messages, and where their parts were in the items.

    Reasoning, text and tool calls of one turn of the assistant become one message.

    Args:
        before: number of messages that come before these.

    Returns:
        The messages, and their places, such as {"messages[0].content": "input[1].output"}.

    Raises:
        InputError: an item has another form.
    """
    messages: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type", "message")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InputError(f"{where} has the type {short_repr(kind, 100)}; {hint(kind, _KINDS)}", param=where)
        keys, read = _KINDS[kind]
        check_fields(item, ("type", "id", "status", *keys), where, where)
        message = read(item, where)
        last = messages[-1] if messages else {}
        shared = message.keys() & last.keys()
        if message["role"] == last.get("role") == "assistant" and shared <= {"role", "tool_calls"}:
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last.update({**message, "tool_calls": calls} if calls else message)
        else:
            messages.append(message)
        place, number = f"messages[{before + len(messages) - 1}]", len(messages[-1].get("tool_calls", ())) - 1
        places.setdefault(place, where)
        field = {"message": "content", "function_call_output": "output"}.get(kind)
        if field is not None:
            places[f"{place}.content"] = f"{where}.{field}"
        elif kind == "function_call":
            places[f"{place}.tool_calls[{number}]"] = where
    return messages, places


def _message(item: _Item, where: str) -> dict[str, Any]:
    return {"role": item.get("role"), "content": item.get("content")}


def _call(item: _Item, where: str) -> dict[str, Any]:
    call_id, name, arguments = (_text(item, key, where) for key in ("call_id", "name", "arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _output(item: _Item, where: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": item.get("output")}


def _reasoning(item: _Item, where: str) -> dict[str, Any]:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{where}.content must be a list of parts with text", param=where)
    for part in parts:
        check_fields(part, ("type", "text"), f"{where}.content", where)
    return {"role": "assistant", "reasoning_content": "".join(_text(part, "text", where) for part in parts)}


def _text(item: _Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}.{key} is {short_repr(value)}; give a string", param=where)
    return value


_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[_Item, str], dict[str, Any]]]] = {
    "message": (("role", "content", "phase"), _message),
    "function_call": (("call_id", "name", "arguments"), _call),
    "function_call_output": (("call_id", "name", "output"), _output),
    "reasoning": (("summary", "content"), _reasoning),
}
"""Type of an item -> (its fields, the function that converts it)."""
