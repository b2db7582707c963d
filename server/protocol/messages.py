"""The body of Anthropic's /v1/messages, and its translation into a chat request.

Source of the fields: the types `MessageCreateParamsBase` and `MessageCountTokensParams` of the `anthropic` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...callers.errors import InputError, hint, short_repr
from ...callers.message_fields import check_fields
from ..reasoning_signer import ReasoningSigner
from .body import IGNORED, Many, Refused, check_refused
from .chat import ChatBody
from .message_blocks import read_turns, system_parts
from .sampling import ONE_ANSWER, OWNER, SamplingBody
from .tools import REFUSED_IN_TOOLS

MIN_THINKING_TOKENS = 1024
_CLEARS = "clear_thinking_20251015"  # leaves out thoughts of earlier turns, as chat templates do
_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict")
_IGNORED_IN_TOOLS = ("cache_control", "input_examples", "eager_input_streaming")
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
"""Type of a tool_choice -> the value in a chat request; "" for a tool by its name."""


class Thinking(BaseModel):
    """Whether the model thinks before it answers. The budget limits nothing of its own; `max_tokens` limits all tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=MIN_THINKING_TOKENS)
    display: Literal["summarized", "omitted"] | None = None


_REFUSED: Refused = {
    **{name: entry for name, entry in OWNER.items() if name != "service_tier"},
    **ONE_ANSWER,
    "n": ((1,), "an answer is one message; send several requests"),
    "stop": ((), "give stop_sequences"),
    "response_format": ((), "give output_config.format"),
    "stream_options": ((), "every stream ends with its usage"),
    "prompt_logprobs": ((), "use /v1/chat/completions"),
    "return_token_ids": ((False,), "use /v1/chat/completions"),
    "return_tokens_as_token_ids": ((False,), "use /v1/chat/completions"),
    "container": ((), "the server runs no code"),
    "mcp_servers": (([],), "the server calls no other servers; offer their tools as tools with an input_schema"),
    "service_tier": (("auto", "standard_only"), "give auto or standard_only; there is one tier"),
    "speed": (("standard", "fast"), "give standard or fast; there is one speed"),
    "fallbacks": (([],), "the server has one model"),
}


class CountBody(SamplingBody):
    """The body of /v1/messages/count_tokens."""

    refused: ClassVar[Refused] = _REFUSED
    ignored: ClassVar[tuple[str, ...]] = (
        *IGNORED,
        *("cache_control", "betas", "inference_geo", "user_profile_id", "workspace_id", "diagnostics"),
    )
    messages: Many[dict[str, Any]] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    stop_sequences: Many[str] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # its older name
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    fit: str | None = None

    @property
    def answer_tokens(self) -> int | None:
        """`SamplingParams.max_tokens`: the engine generates at least one token."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    def chat_body(self, signer: ReasoningSigner) -> tuple[ChatBody, dict[str, str]]:
        """Return the same request to /v1/chat/completions, and the places of its messages in this body.

        Args:
            signer: reads the signatures of thinking.

        Raises:
            InputError: a field has another form or cannot be honoured.
        """
        self._check()
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name not in self.refused}
        system = [] if self.system is None else [{"role": "system", "content": system_parts(self.system)}]
        turns, places = read_turns(self.messages, signer, len(system))
        choice, parallel = self._tool_choice()
        computed = {
            "messages": [*system, *turns],
            "max_tokens": self.answer_tokens,
            "stop": self.stop_sequences,
            "tools": [_chat_tool(tool, index) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "reasoning_effort": self._effort(),
            "response_format": self._format(),
            "include_reasoning": None if self.thinking is None else self.thinking.type != "disabled",
            "chat_template_kwargs": {**self._thinking_variables(), **(self.chat_template_kwargs or {})},
            "continue_final_message": turns[-1]["role"] == "assistant",
            "fit": self.fit,
        }
        return ChatBody.model_construct(**{**shared, **computed}), {"messages": "messages", "messages[0]": "system", **places}

    def _check(self) -> None:
        thinking, limit = self.thinking, self.max_tokens
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
            reason = f"thinking.budget_tokens is missing; give {MIN_THINKING_TOKENS} or above"
            raise InputError(reason, code="invalid_value", param="thinking")
        budget = None if thinking is None else thinking.budget_tokens
        if budget is not None and limit is not None and budget >= limit:
            reason = f"max_tokens={limit} must be above thinking.budget_tokens={budget}"
            raise InputError(f"{reason}; raise max_tokens, or lower the budget", code="invalid_value", param="max_tokens")
        edits = (self.context_management or {}).get("edits") or []
        check_fields(self.context_management or {}, ("edits",), "context_management", "context_management")
        if not isinstance(edits, list) or not all(isinstance(edit, dict) and edit.get("type") == _CLEARS for edit in edits):
            reason = f"the server edits no conversations, except that {_CLEARS} is left to the chat template"
            raise InputError(f"<<param>> cannot be honoured: {reason}", code="unsupported", param="context_management")

    def _tool_choice(self) -> tuple[str | dict[str, Any] | None, bool | None]:
        """Return tool_choice and parallel_tool_calls of a chat request."""
        choice = self.tool_choice
        if choice is None:
            return None, None
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in _CHOICES:
            reason = f"<<param>> has the type {short_repr(kind)}; {hint(kind, _CHOICES)}"
            raise InputError(reason, code="unknown_name", value=kind, param="tool_choice")
        check_fields(
            choice, ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])), "tool_choice", "tool_choice"
        )
        name, alone = choice.get("name"), choice.get("disable_parallel_tool_use")
        if (kind == "tool" and not isinstance(name, str)) or not isinstance(alone, bool | None):
            how = '{"type": "tool", "name": ...}, and disable_parallel_tool_use as true or false'
            raise InputError(f"<<param>> is {short_repr(choice)}; give {how}", code="invalid_value", param="tool_choice")
        return _CHOICES[kind] or {"type": "function", "function": {"name": name}}, None if alone is None else not alone

    def _thinking_variables(self) -> dict[str, Any]:
        """Return the variables by which chat templates of Qwen and GLM, and of Granite and DeepSeek, know whether to think."""
        if self.thinking is None or self.thinking.type not in ("enabled", "disabled"):
            return {}
        return dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type == "enabled")

    def _effort(self) -> str | None:
        config = self.output_config or {}
        check_fields(config, ("effort", "format"), "output_config", "output_config")
        effort = config.get("effort")
        if not isinstance(effort, str | None):
            reason = f"output_config.effort is {short_repr(effort)}; give a string"
            raise InputError(reason, code="invalid_value", param="output_config")
        return effort

    def _format(self) -> dict[str, Any] | None:
        """Return output_config.format in the form of chat's response_format."""
        output_format: Any = (self.output_config or {}).get("format") or self.output_format
        if output_format is None:
            return None
        if (
            not isinstance(output_format, dict)
            or output_format.get("type") != "json_schema"
            or not isinstance(output_format.get("schema"), dict)
        ):
            how = '{"type": "json_schema", "schema": {...}}'
            raise InputError(
                f"output_config.format is {short_repr(output_format)}; give {how}", code="invalid_value", param="output_config"
            )
        check_fields(output_format, ("type", "schema"), "output_config.format", "output_config")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": output_format["schema"]}}


class MessagesBody(CountBody):
    """The body of /v1/messages. `max_tokens` of 0 only reads the prompt, which the cache of prefixes then has."""

    max_tokens: int = Field(ge=0)  # type: ignore[assignment]


def _chat_tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a tool in the form of /v1/chat/completions."""
    where, kind = f"tools[{index}]", tool.get("type")
    if kind not in (None, "custom"):
        reason = f"{where} has the type {short_repr(kind, 60)}, which Anthropic's models and servers know"
        raise InputError(f"{reason}; give a tool with a name and an input_schema", code="unsupported", param="tools")
    check_refused(tool, REFUSED_IN_TOOLS, where, "tools")
    fields = {name: value for name, value in tool.items() if name not in (*_IGNORED_IN_TOOLS, *REFUSED_IN_TOOLS)}
    check_fields(fields, _TOOL_KEYS, where, "tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InputError(f"{where}.input_schema must be a JSON schema", code="invalid_value", param="tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": schema}}


def as_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, empty if the token limit cut them off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
