"""The turns of /v1/messages as chat messages. Source of the blocks: `ContentBlockParam` of the `anthropic` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...callers.errors import InputError, hint, short_repr
from ...callers.message_fields import check_fields
from ..reasoning_signer import ReasoningSigner
from .body import Refused, check_refused

_Block = Mapping[str, Any]
_RUN_HERE = "the server runs no tools of its own; leave the block out, or give a tool_use and its tool_result"
_OTHER_KINDS = dict.fromkeys(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("container_upload", "mcp_tool_use", "mcp_tool_result", "tool_reference", "browser_state"),
    ),
    _RUN_HERE,
)
_OTHER_KINDS |= {"compaction": "the server compacts no conversations; give a text with what was said before"}
"""Types of blocks that Anthropic's servers know beside these, and why they cannot be honoured."""
_IMAGE: Refused = {"transformations": (({}, {"oversized_image": "downsize"}), "large images are always scaled down")}
_DOCUMENT: Refused = {"citations": (({}, {"enabled": False}), "answers have no citations")}
_TOOL_USE: Refused = {
    "caller": (({"type": "direct"},), "the model alone calls tools"),
    "toolset_name": ((), "tools have no sets; put it into the name"),
}


def read_turns(
    turns: Sequence[Mapping[str, Any]], signer: ReasoningSigner, before: int = 0
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return chat messages, and where they and their parts were in the turns.

    Turns of one role that follow each other become one message. Each `tool_result` becomes a message of its own.

    Args:
        signer: reads the signatures of thinking.
        before: number of messages that come before these.

    Returns:
        The messages, and their places, such as {"messages[1].content[0]": "messages[0].content[2]"}.

    Raises:
        InputError: a turn or a block has another form.
    """
    reader = _Reader(signer, before)
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        check_fields(turn, ("role", "content"), where, where)
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            reason = f"<<param>> has the role {short_repr(role, 40)}; give user, assistant or system"
            raise InputError(reason, code="invalid_value", param=where)
        if not isinstance(content, str | list):
            raise InputError(f"{where}.content must be a text or a list of blocks", code="invalid_value", param=where)
        blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        reader.begin(role, where)
        for number, block in enumerate(blocks):
            path = where if isinstance(content, str) else f"{where}.content[{number}]"
            reader.read(block, path)
    return [_simplified(message) for message in reader.messages], reader.places


def system_parts(system: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the text of the system, or its parts."""
    if isinstance(system, str):
        return system
    return [_text_part(block, f"system[{index}]") for index, block in enumerate(system)]


class _Reader:
    def __init__(self, signer: ReasoningSigner, before: int) -> None:
        self._signer, self._before = signer, before
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._role = ""

    def begin(self, role: str, where: str) -> None:
        """Begin a turn, in the last message if that has the same role."""
        self._role = role
        if not self.messages or self.messages[-1]["role"] != role:
            self._add({"role": role, "content": []}, where)

    def read(self, block: Any, where: str) -> None:
        kind = block.get("type") if isinstance(block, Mapping) else None
        kinds = _ROLES[self._role]
        if isinstance(kind, str) and kind in _OTHER_KINDS:
            raise InputError(f"<<param>> has the type {kind}: {_OTHER_KINDS[kind]}", code="unsupported", param=where)
        if not isinstance(kind, str) or kind not in kinds:
            reason = f"<<param>> has the type {short_repr(kind, 60)} in a turn of the {self._role}; {hint(kind, kinds)}"
            raise InputError(reason, code="unknown_name", value=kind, param=where)
        if kind in _PARTS:
            if self.messages[-1]["role"] != self._role:  # after a tool_result
                self._add({"role": self._role, "content": []}, where)
            for part in _PARTS[kind](block, where):
                content = self.messages[-1]["content"]
                content.append(part)
                self.places[f"{self._place}.content[{len(content) - 1}]"] = where
        elif kind == "tool_result":
            self._add_result(block, where)
        elif kind == "tool_use":
            self._add_call(block, where)
        elif kind == "thinking":
            self._add_thinking(block, where)

    @property
    def _place(self) -> str:
        return f"messages[{self._before + len(self.messages) - 1}]"

    def _add(self, message: dict[str, Any], where: str) -> None:
        if self.messages and self.messages[-1] == {"role": "user", "content": []}:
            self.messages.pop()  # of a turn that begins with results
        self.messages.append(message)
        self.places[self._place] = where

    def _add_result(self, block: _Block, where: str) -> None:
        check_refused(block, _TOOL_USE, where, where)
        check_fields(block, ("type", "tool_use_id", "content", "is_error", "cache_control", *_TOOL_USE), where, where)
        content, parts = block.get("content"), []
        if isinstance(content, list):
            for number, inner in enumerate(content):
                kind = inner.get("type") if isinstance(inner, Mapping) else None
                if not isinstance(kind, str) or kind not in _PARTS:
                    reason = f"{where}.content[{number}] has the type {short_repr(kind, 60)}; {hint(kind, _PARTS)}"
                    raise InputError(reason, code="unknown_name", value=kind, param=where)
                parts += _PARTS[kind](inner, f"{where}.content[{number}]")
        elif not isinstance(content, str | None):
            raise InputError(f"{where}.content must be a text or a list of blocks", code="invalid_value", param=where)
        message = {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where)}
        self._add({**message, "content": parts or (content if isinstance(content, str) else "")}, where)

    def _add_call(self, block: _Block, where: str) -> None:
        check_refused(block, _TOOL_USE, where, where)
        check_fields(block, ("type", "id", "name", "input", "cache_control", *_TOOL_USE), where, where)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise InputError(f"{where}.input must be an object", code="invalid_value", param=where)
        function = {"name": _text(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": _text(block, "id", where), "type": "function", "function": function}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append(call)
        self.places[f"{self._place}.tool_calls[{len(calls) - 1}]"] = where

    def _add_thinking(self, block: _Block, where: str) -> None:
        """Add a thought. One that was left out of the answer (`display`) is in its signature."""
        check_fields(block, ("type", "thinking", "signature", "cache_control"), where, where)
        thought, signature = _text(block, "thinking", where), _text(block, "signature", where)
        if not thought:
            thought = self._signer.verify(signature, where)
        message = self.messages[-1]
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))


def _simplified(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a string if it is one text, and null if it is empty beside calls or a thought."""
    content = message["content"]
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return {**message, "content": content[0]["text"]}
    return {**message, "content": content or (None if len(message) > 2 and message["role"] == "assistant" else "")}


def _text(block: _Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InputError(f"{where}.{key} is {short_repr(value)}; give a string", code="invalid_value", param=where)
    return value


def _text_part(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, Mapping) or block.get("type") != "text":
        raise InputError(f'{where} must be {{"type": "text", "text": ...}}', code="invalid_value", param=where)
    check_fields(block, ("type", "text", "cache_control", "citations"), where, where)
    return {"type": "text", "text": _text(block, "text", where)}


def _text_parts(block: _Block, where: str) -> list[dict[str, Any]]:
    return [_text_part(block, where)]


def _image_parts(block: _Block, where: str) -> list[dict[str, Any]]:
    check_refused(block, _IMAGE, where, where)
    check_fields(block, ("type", "source", "cache_control", *_IMAGE), where, where)
    return [{"type": "image", "source": block.get("source")}]


def _document_parts(block: _Block, where: str) -> list[dict[str, Any]]:
    """Return a document as parts: its title and context, and its text, its blocks or the pages of its file."""
    check_refused(block, _DOCUMENT, where, where)
    check_fields(block, ("type", "source", "title", "context", "cache_control", *_DOCUMENT), where, where)
    source = block.get("source")
    about = [_text(block, key, where) for key in ("title", "context") if block.get(key) is not None]
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{text}\n"} for text in about]
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        return [*parts, {"type": "document", "source": source}]
    if kind == "text":
        check_fields(source, ("type", "media_type", "data"), f"{where}.source", where)
        return [*parts, {"type": "text", "text": _text(source, "data", f"{where}.source")}]
    check_fields(source, ("type", "content"), f"{where}.source", where)
    content = source.get("content")
    blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds = (
        [inner.get("type") if isinstance(inner, Mapping) else None for inner in blocks] if isinstance(blocks, list) else [None]
    )
    if any(kind not in ("text", "image") for kind in kinds):
        reason = f"{where}.source.content must be a text, or a list of blocks of the types text and image"
        raise InputError(reason, code="invalid_value", param=where)
    return parts + [part for inner in blocks for part in _PARTS[inner["type"]](inner, where)]


def _result_parts(block: _Block, where: str) -> list[dict[str, Any]]:
    """Return a search result as texts: its title and source, and its content."""
    check_refused(block, _DOCUMENT, where, where)
    check_fields(block, ("type", "source", "title", "content", "cache_control", *_DOCUMENT), where, where)
    content = block.get("content")
    if not isinstance(content, list):
        raise InputError(f"{where}.content must be a list of texts", code="invalid_value", param=where)
    head = f"{_text(block, 'title', where)}\n{_text(block, 'source', where)}\n"
    return [{"type": "text", "text": head}, *(_text_part(passage, where) for passage in content)]


_PARTS: Mapping[str, Callable[[_Block, str], list[dict[str, Any]]]] = {
    "text": _text_parts,
    "image": _image_parts,
    "document": _document_parts,
    "search_result": _result_parts,
}
"""Type of a block that has content -> the function that converts it into parts of a chat message."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    "user": (*_PARTS, "tool_result"),
    "assistant": (*_PARTS, "thinking", "redacted_thinking", "tool_use"),  # of redacted thinking, nothing can be read
    "system": ("text",),
}
"""Role -> the types of the blocks that its turns may have."""
