"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from ...engine.structured_outputs import StructuredOutputsParams
from ...mm.errors import InputError, short_repr
from ...mm.message_fields import check_fields
from .body import Many, Refused
from .messages import read_functions
from .sampling import OWNER, SamplingBody

_TEXT_ANSWERS = "answers are text"


class ChatBody(SamplingBody):
    refused: ClassVar[Refused] = {
        **OWNER,
        "modalities": ((["text"],), _TEXT_ANSWERS),
        "audio": ((), _TEXT_ANSWERS),
        "prediction": ((), "there are no predicted outputs"),
        "web_search_options": ((), "there is no web search"),
        "functions": ((), "give tools"),
        "function_call": ((), "give tool_choice"),
        "verbosity": ((), "ask for it in a message"),
    }
    messages: Many[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
            raise InputError("top_logprobs needs logprobs=true; set it, or remove top_logprobs", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """`SamplingParams.max_tokens`; None for the end of the context."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            reason = "max_tokens and max_completion_tokens differ; give one of them"
            raise InputError(reason, param="max_completion_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The tools' parameters by name; empty if the model must not call any.

        Raises:
            InputError: a tool has another form.
        """
        return read_functions(self.tools or ())

    @property
    def forced_function(self) -> str | None:
        """The function that tool_choice names, "" for any function, or None if the model may choose.

        Raises:
            InputError: tool_choice has another form, or names no tool.
        """
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return None
        name: object = ""
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
        elif choice != "required":
            name = None
        if name is None or (name and name not in self.functions) or not self.functions:
            how = "give auto, none, required, or a function by its name in tools"
            raise InputError(f"tool_choice is {short_repr(choice)}; {how}", param="tool_choice")
        if isinstance(choice, dict):
            check_fields(choice, ("type", "function"), "tool_choice", "tool_choice")
            check_fields(choice["function"], ("name",), "tool_choice.function", "tool_choice")
        return str(name)

    @property
    def format_field(self) -> str:
        return super().format_field if self.tool_choice in (None, "none", "auto") else "tools"

    def forced_format(self) -> StructuredOutputsParams | None:
        """The format of an answer that must call a function: its arguments, or a list of calls of any function."""
        name, functions = self.forced_function, self.functions
        if name is None:
            return None
        if name:
            return StructuredOutputsParams(json=functions[name] or {"type": "object"})
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": one}, "parameters": parameters or {"type": "object"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for one, parameters in functions.items()
        ]
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        return StructuredOutputsParams(json={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})
