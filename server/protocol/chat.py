"""The body of /v1/chat/completions."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...callers.errors import InputError, short_repr
from ...callers.message_fields import check_fields
from ...engine.sampling_params import SamplingParams
from ...engine.structured_outputs import StructuredOutputsParams
from .body import Many, Refused
from .sampling import OWNER, SamplingBody
from .tools import Tool, named_tool, read_tools

_TEXT_ANSWERS = "answers are text"


class ChatBody(SamplingBody):
    refused: ClassVar[Refused] = {
        **OWNER,
        "modalities": ((["text"],), _TEXT_ANSWERS),
        "audio": ((), _TEXT_ANSWERS),
        "web_search_options": ((), "there is no web search; offer a function that searches"),
        "echo": ((False,), "answers do not repeat a message; continue_final_message continues it"),
        "add_special_tokens": ((False,), "the chat template writes them"),
        "functions": ((), "give tools"),
        "function_call": ((), "give tool_choice"),
    }
    messages: Many[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Many[dict[str, Any]] | None = None
    prediction: dict[str, Any] | None = None
    fit: str | None = None
    return_timings: bool | None = None
    return_elements: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs`.

        Raises:
            InputError: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("<<param>> needs logprobs=true; set it, or remove <<param>>", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    def sampling_params(self, defaults: SamplingParams, **computed: Any) -> SamplingParams:
        if self.prediction is not None:
            computed["draft_text"] = self._predicted_text(self.prediction)
        return super().sampling_params(defaults, **computed)

    def _predicted_text(self, prediction: dict[str, Any]) -> str:
        """Return the text of OpenAI's prediction, which is our `draft_text`.

        Raises:
            InputError: it has another form, or `draft_text` is given as well.
        """
        if self.draft_text is not None:
            raise InputError("<<param>> and draft_text exclude each other; give one of them", param="prediction")
        content = prediction.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        values = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        texts = [value for value in values if isinstance(value, str)]
        if prediction.get("type") != "content" or len(texts) < len(parts):
            shape = '{"type": "content", "content": a text or a list of {"type": "text", "text": ...}}'
            raise InputError(f"<<param>> must be {shape}", code="invalid_value", param="prediction")
        check_fields(prediction, ("type", "content"), "prediction", "prediction")
        return "".join(texts)

    @property
    def draft_field(self) -> str:
        """The field that gives the draft of the answer."""
        return "draft_text" if self.prediction is None else "prediction"

    @property
    def token_limit(self) -> int | None:
        """`SamplingParams.max_tokens`; None for the end of the context."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            reason = "max_tokens and <<param>> differ; give one of them"
            raise InputError(reason, code="invalid_value", param="max_completion_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @cached_property
    def offered(self) -> dict[str, Tool]:
        """The tools that the model may call, by name.

        Raises:
            InputError: a tool, or tool_choice, has another form.
        """
        tools = {tool.name: tool for tool in read_tools(self.tools or ())}
        choice = self.tool_choice
        if choice == "none":
            return {}
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return tools
        names = [named_tool(entry, "tool_choice.allowed_tools.tools") for entry in self._allowed(choice)["tools"]]
        for name in names:
            if name not in tools:
                reason = f"<<param>> allows {short_repr(name)}, which tools does not have; add it there, or leave it out"
                raise InputError(reason, param="tool_choice")
        return {name: tool for name, tool in tools.items() if name in names}

    @cached_property
    def forced_tool(self) -> str | None:
        """The tool that tool_choice names, "" for any tool, or None if the model may choose.

        Raises:
            InputError: tool_choice has another form, or names no tool.
        """
        choice: Any = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice = self._allowed(choice)["mode"]
        if choice in (None, "none", "auto"):
            return None
        tools = self.offered
        name = named_tool(choice, "tool_choice") if isinstance(choice, dict) else "" if choice == "required" else None
        if name is None or (name and name not in tools) or not tools:
            how = "give auto, none, required, allowed_tools, or a tool by its name in tools"
            raise InputError(f"<<param>> is {short_repr(choice)}; {how}", param="tool_choice")
        if not name and len(tools) == 1 and next(iter(tools.values())).grammar is not None:
            return next(iter(tools))  # its grammar then holds
        return name

    def _allowed(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return mode and tools of a tool_choice of the type allowed_tools."""
        allowed = choice.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools) or mode not in ("auto", "required"):
            shape = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
            raise InputError(f"<<param>> must be {shape}", code="invalid_value", param="tool_choice")
        check_fields(choice, ("type", "allowed_tools"), "tool_choice", "tool_choice")
        check_fields(allowed or {}, ("mode", "tools"), "tool_choice.allowed_tools", "tool_choice")
        return {"mode": mode, "tools": tools}

    @property
    def continued_text(self) -> str:
        """The text of the last message, if the answer continues it."""
        content = self.messages[-1].get("content") if self.continue_final_message else ""
        parts = content if isinstance(content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return content if isinstance(content, str) else "".join(text for text in texts if isinstance(text, str))

    @property
    def format_field(self) -> str:
        return super().format_field if self.forced_tool is None else "tools"

    def forced_format(self) -> StructuredOutputsParams | None:
        """The format of an answer that must call a tool: the input of the tool that is named, or a list of calls of any tool.

        The input of a custom tool with a grammar is the whole answer; other inputs are arguments as JSON.
        """
        name = self.forced_tool
        if name is None:
            return None
        if name:
            tool = self.offered[name]
            return tool.grammar or StructuredOutputsParams(json=tool.parameters or {"type": "object"})
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": tool.parameters or {"type": "object"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, tool in self.offered.items()
        ]
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return StructuredOutputsParams(json={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})
