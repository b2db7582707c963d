"""The body of /v1/responses, and its translation into a chat request."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from ...mm.errors import InputError, hint, short_repr
from ...mm.message_fields import check_fields
from .body import Many, Refused
from .chat import ChatBody
from .response_input import read_items
from .sampling import OWNER, SamplingBody

LOGPROBS = "message.output_text.logprobs"
_NOT_STORED = "responses are not stored; send the whole conversation as input"
_ECHOED = ("instructions", "metadata", "tools", "tool_choice", "reasoning", "text")
_TOOL_KEYS = ("type", "name", "description", "parameters", "strict")


class ResponsesBody(SamplingBody):
    refused: ClassVar[Refused] = {
        **OWNER,
        "previous_response_id": ((), _NOT_STORED),
        "conversation": ((), _NOT_STORED),
        "background": ((False,), "a response is sent over the connection that asks for it"),
        "background_options": ((), "there are no responses in the background"),
        "prompt": ((), "there are no stored prompts; give instructions and input"),
        "max_tool_calls": ((), "the server runs no tools"),
        "context_management": ((), "shorten the input"),
        "truncation": (("disabled",), "shorten the input"),
        "moderation": ((), "there is no moderation"),
        "access_programs": ((), "there are no access programs"),
        "image": ((), "answers are text"),
        "prompt_cache_options": ((), "every prefix is cached"),
        "n": ((1,), "a response has one answer; send several requests"),
        "max_tokens": ((), "give max_output_tokens"),
        "response_format": ((), "give text.format"),
        "prompt_logprobs": ((), "use /v1/chat/completions"),
        "return_token_ids": ((False,), "use /v1/chat/completions"),
    }
    input: str | Many[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 63)
    metadata: dict[str, Any] | None = None
    include: Many[str] | None = None
    top_logprobs: int | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_body(self) -> tuple[ChatBody, dict[str, str]]:
        """Return the same request to /v1/chat/completions, and the places of its messages in this body.

        Raises:
            InputError: a field has another form or cannot be honoured.
        """
        for name in _ECHOED:
            _check_json(name, getattr(self, name))
        for name in self.include or ():
            if name != LOGPROBS:
                raise InputError(f"include has {short_repr(name, 100)}; {hint(name, (LOGPROBS,))}", param="include")
        with_logprobs = bool(self.include or self.top_logprobs)
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name not in self.refused}
        tools, choice = self._tools()
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        places = {"messages": "input"} | ({"messages[0]": "instructions"} if system else {})
        if isinstance(self.input, str):
            items, found = [{"role": "user", "content": self.input}], {f"messages[{len(system)}]": "input"}
        else:
            items, found = read_items(self.input, len(system))
        own = {
            "messages": [*system, *items],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": with_logprobs,
            "top_logprobs": self.top_logprobs if with_logprobs else None,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self._effort(),
            "response_format": self._format(),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_construct(**{**shared, **own}), places | found

    def _tools(self) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
        """Return the tools that the model may call, and the choice among them, in the form of chat."""
        choice, names = self.tool_choice, None
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            check_fields(choice, ("type", "mode", "tools"), "tool_choice", "tool_choice")
            allowed: object = choice.get("tools")
            names = [one.get("name") for one in allowed if isinstance(one, dict)] if isinstance(allowed, list) else []
            choice = choice.get("mode")
            if choice not in ("auto", "required"):
                raise InputError(f"tool_choice.mode is {short_repr(choice)}; give auto or required", param="tool_choice")
        elif isinstance(choice, dict):
            check_fields(choice, ("type", "name"), "tool_choice", "tool_choice")
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        given = [_function(index, tool) for index, tool in enumerate(self.tools or ())]
        found = [tool for tool in given if names is None or tool["function"]["name"] in names]
        if names and not all(any(name == tool["function"]["name"] for tool in found) for name in names):
            raise InputError("tool_choice.tools must name functions of tools", param="tool_choice")
        return found or None, choice

    def _effort(self) -> Any:
        reasoning = self.reasoning or {}
        effort = reasoning.get("effort")
        for name, value in reasoning.items():
            if name not in ("effort", "summary", "generate_summary"):
                raise InputError(f"reasoning.{name} cannot be honoured; {hint(name, ('effort', 'summary'))}", param="reasoning")
            if name != "effort" and value not in (None, "auto"):
                reason = "reasoning is not summarised; its whole text is in the response"
                raise InputError(f"reasoning.{name}={short_repr(value)} cannot be honoured: {reason}", param="reasoning")
        if not (effort is None or isinstance(effort, str)):
            raise InputError(f"reasoning.effort is {short_repr(effort)}; give a string", param="reasoning")
        return effort

    def _format(self) -> dict[str, Any] | None:
        """Return text.format in the form of chat's response_format."""
        for name, value in (self.text or {}).items():
            if name != "format" and not (name == "verbosity" and value in (None, "medium")):
                reason = "ask for it in the input" if name == "verbosity" else hint(name, ("format",))
                raise InputError(f"text.{name}={short_repr(value)} cannot be honoured: {reason}", param="text")
        form = (self.text or {}).get("format")
        kind = form.get("type") if isinstance(form, dict) else None
        if form is None:
            return None
        if kind in ("text", "json_object"):
            check_fields(form, ("type",), "text.format", "text")
            return {"type": kind}
        if kind != "json_schema" or not isinstance(form.get("schema"), dict):
            how = '{"type": "json_schema", "name": ..., "schema": {...}}, {"type": "json_object"} or {"type": "text"}'
            raise InputError(f"text.format is {short_repr(form)}; give {how}", param="text")
        check_fields(form, ("type", "name", "description", "schema", "strict"), "text.format", "text")
        return {"type": kind, "json_schema": form}


def _check_json(name: str, value: object) -> None:
    """Check that a response can contain a value of its request."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InputError(f"{name} has NaN, infinity, half a character or too many levels; leave them out", param=name) from None


def _function(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat."""
    name = tool.get("name")
    if tool.get("type") != "function" or not (isinstance(name, str) and name):
        form = '{"type": "function", "name": ..., "parameters": {...}}'
        raise InputError(f"tools[{index}] must be {form}; the server runs no tools of its own", param="tools")
    given = {key: value for key, value in tool.items() if key in _TOOL_KEYS or value is not False}
    check_fields(given, _TOOL_KEYS, f"tools[{index}]", "tools")
    function = {key: tool[key] for key in _TOOL_KEYS[1:-1] if tool.get(key) is not None}
    if not isinstance(function.get("parameters", {}), dict):
        raise InputError(f"tools[{index}].parameters must be a JSON schema", param="tools")
    return {"type": "function", "function": function}
