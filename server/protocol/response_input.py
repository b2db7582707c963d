"""The input items of /v1/responses as chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from ...callers.errors import InputError, hint, short_repr
from ...callers.message_fields import check_fields
from ..reasoning_signer import ReasoningSigner
from .body import Refused, check_refused
from .tools import as_arguments

_Item = Mapping[str, Any]
ITEM_PREFIXES = {
    **{"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"},
    **{"function_call_output": "fco_", "custom_tool_call_output": "ctco_"},
}
"""Type of an item -> how its id begins."""


def read_items(
    items: Sequence[_Item], signer: ReasoningSigner, before: int = 0, start: int = 0
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return chat messages, and where their parts were in the items.

    Reasoning, text and tool calls of one turn of the assistant become one message.

    Args:
        signer: reads the `encrypted_content` of reasoning.
        before: number of messages that come before these.
        start: the first item; those before it are left out, except messages of the system.

    Returns:
        The messages, and their places, such as {"messages[0].content": "input[1].output"}.

    Raises:
        InputError: an item has another form.
    """
    messages: list[dict[str, Any]] = []
    thoughts: dict[int, list[str]] = {}  # number of a message -> the reasoning items before its text
    places: dict[str, str] = {}
    for index, item in enumerate(items):
        if index < start and item.get("role") not in _SYSTEM:
            continue
        where, kind = f"input[{index}]", _kind(item, f"input[{index}]")
        keys, read = _KINDS[kind]
        check_refused(item, _REFUSED, where, where)
        check_fields(item, ("type", "id", "status", *keys, *_REFUSED), where, where)
        message = read(item, where, signer)
        if not any(message[key] for key in message if key != "role") and kind == "reasoning":
            continue
        _add(message, messages, thoughts)
        path, number = f"messages[{before + len(messages) - 1}]", len(messages[-1].get("tool_calls", ())) - 1
        places.setdefault(path, where)
        field = "content" if kind == "message" else "output" if kind.endswith("_output") else None
        if field is not None:
            places[f"{path}.content"] = f"{where}.{field}"
        elif kind.endswith("_call"):
            places[f"{path}.tool_calls[{number}]"] = where
    for number, parts in thoughts.items():
        messages[number]["reasoning_content"] = "\n".join(parts)
    return messages, places


def stored_items(items_or_text: str | Sequence[_Item]) -> list[dict[str, Any]]:
    """Return an input as items that have a type, an id and a status, with texts as parts."""
    items: Sequence[_Item] = [{"role": "user", "content": items_or_text}] if isinstance(items_or_text, str) else items_or_text
    stored = []
    for item in items:
        kind, content = item.get("type") or "message", item.get("content")
        more: dict[str, Any] = {}
        if kind == "message" and isinstance(content, str):
            is_answer = item.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
            more["content"] = [{**part, "text": content}]
        values = {name: value for name, value in item.items() if value is not None}
        stored.append({"id": new_item_id(kind), "status": "completed", **values, "type": kind, **more})
    return stored


def new_item_id(kind: str) -> str:
    return f"{ITEM_PREFIXES.get(kind, 'item_')}{uuid4().hex}"


def _add(message: dict[str, Any], messages: list[dict[str, Any]], thoughts: dict[int, list[str]]) -> None:
    """Add a message. What the assistant says in items one after another, such as a thought and two calls, is one message."""
    last = messages[-1] if messages else {}
    shared = message.keys() & last.keys()
    if "reasoning_content" in message and set(last) == {"role", "reasoning_content"}:
        thoughts.setdefault(len(messages) - 1, [last["reasoning_content"]]).append(message["reasoning_content"])
    elif message["role"] == last.get("role") == "assistant" and shared <= {"role", "tool_calls"}:
        calls = last.get("tool_calls", [])
        calls += message.get("tool_calls", [])
        last.update({**message, "tool_calls": calls} if calls else message)
    else:
        messages.append(message)


def _kind(item: _Item, where: str) -> str:
    """Return the type of an item. Raise InputError for one that cannot be honoured."""
    kind = item.get("type")
    if kind is None:
        return "message"
    if isinstance(kind, str) and kind in _OTHER_KINDS:
        raise InputError(f"<<param>> has the type {kind}: {_OTHER_KINDS[kind]}", param=where)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(
            f"<<param>> has the type {short_repr(kind, 100)}; {hint(kind, _KINDS)}",
            code="unknown_name",
            value=kind,
            param=where,
        )
    return kind


def _message(item: _Item, where: str, signer: ReasoningSigner) -> dict[str, Any]:
    return {"role": item.get("role"), "content": item.get("content")}


def _call(item: _Item, where: str, signer: ReasoningSigner) -> dict[str, Any]:
    call_id, name, arguments = (_text(item, key, where) for key in ("call_id", "name", "arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _custom_call(item: _Item, where: str, signer: ReasoningSigner) -> dict[str, Any]:
    call_id, name, text = (_text(item, key, where) for key in ("call_id", "name", "input"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": as_arguments(text)}}
    return {"role": "assistant", "tool_calls": [call]}


def _output(item: _Item, where: str, signer: ReasoningSigner) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": item.get("output")}


def _reasoning(item: _Item, where: str, signer: ReasoningSigner) -> dict[str, Any]:
    parts = item.get("content") or item.get("summary") or []
    if item.get("encrypted_content"):
        signed = _text(item, "encrypted_content", where)
        try:
            return {"role": "assistant", "reasoning_content": signer.verify(signed, where)}
        except InputError:
            if not parts:  # else its own text stands for it, or the summary
                raise
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{where}.content must be a list of parts with text", code="invalid_value", param=where)
    for part in parts:
        check_fields(part, ("type", "text"), f"{where}.content", where)
    return {"role": "assistant", "reasoning_content": "".join(_text(part, "text", where) for part in parts)}


def _text(item: _Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}.{key} is {short_repr(value)}; give a string", code="invalid_value", param=where)
    return value


_SYSTEM = ("system", "developer")
_REFUSED: Refused = {
    "async": ((False,), "a call is answered by an item of the next request"),
    "caller": (({"type": "direct"},), "the model alone calls tools"),
    "namespace": ((), "tools have no namespaces; put it into the name"),
}
"""Fields of calls and their outputs: the values that they may have."""
_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[_Item, str, ReasoningSigner], dict[str, Any]]]] = {
    "message": (("role", "content", "phase"), _message),
    "function_call": (("call_id", "name", "arguments"), _call),
    "function_call_output": (("call_id", "name", "output"), _output),
    "custom_tool_call": (("call_id", "name", "input"), _custom_call),
    "custom_tool_call_output": (("call_id", "name", "output"), _output),
    "reasoning": (("summary", "content", "encrypted_content"), _reasoning),
}
"""Type of an item -> (its fields, the function that converts it)."""
_RUN_HERE = "the server runs no tools of its own; leave the item out, or give a function_call and its output"
_OTHER_KINDS = {
    "item_reference": "items are not stored; give the item itself",
    "compaction": "the server compacts no conversations; give a message with what was said before",
    "compaction_trigger": "the server compacts no conversations; leave it out",
    "additional_tools": "give them in tools",
    "configuration_update": "give reasoning and text of the request",
    "tool_search_call": "there is no search for tools; leave it out",
    "tool_search_output": "there is no search for tools; give its tools in tools",
    **dict.fromkeys(
        (
            *("file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call"),
            *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
            *("apply_patch_call", "apply_patch_call_output", "program", "program_output"),
            *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
        ),
        _RUN_HERE,
    ),
}
"""Types of items that OpenAI's servers know beside these, and why they cannot be honoured."""
