"""The body of /v1/responses, and its translation into a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...callers.errors import InputError, hint, short_repr
from ...callers.message_fields import check_fields
from ..reasoning_signer import ReasoningSigner
from .body import Many, Refused, check_refused
from .chat import ChatBody
from .response_input import read_items, stored_items
from .sampling import ONE_ANSWER, OWNER, VERBOSITIES, SamplingBody
from .tools import chat_choice, chat_tool

LOGPROBS, REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDE = {
    LOGPROBS: "",
    REASONING: "",
    "message.input_image.image_url": "",  # responses do not repeat their input
    "file_search_call.results": "there is no file search",
    "web_search_call.results": "there is no web search",
    "web_search_call.action.sources": "there is no web search",
    "code_interpreter_call.outputs": "the server runs no code",
    "computer_call_output.output.image_url": "the server drives no computer",
}
"""OpenAI's values of include, and why some cannot be honoured."""
SUMMARIES = ("auto", "concise", "detailed")
_NO_CONVERSATIONS = "there are no stored conversations; give previous_response_id, or the whole conversation as input"
_ECHOED = ("instructions", "metadata", "tools", "tool_choice", "reasoning", "text")
_REASONING: Refused = {
    "summary": ((*SUMMARIES, None), "give auto, concise or detailed; the whole reasoning is in the response"),
    "generate_summary": ((*SUMMARIES, None), "give auto, concise or detailed; the whole reasoning is in the response"),
    "context": (("auto",), "the chat template decides which reasoning it shows"),
    "mode": (("standard",), "there is one mode"),
}
"""Fields of reasoning beside effort: the values that a request may state."""


class ResponsesBody(SamplingBody):
    refused: ClassVar[Refused] = {
        **{name: entry for name, entry in OWNER.items() if name != "store"},
        **ONE_ANSWER,
        "conversation": ((), _NO_CONVERSATIONS),
        "background_options": ((), "a response in the background has no options"),
        "prompt": ((), "there are no stored prompts; give instructions and input"),
        "context_management": (([],), "shorten the input"),
        "access_programs": ((), "there are no access programs"),
        "image": ((), "answers are text"),
        "n": ((1,), "a response has one answer; send several requests"),
        "max_tokens": ((), "give max_output_tokens"),
        "response_format": ((), "give text.format"),
        "prompt_logprobs": ((), "use /v1/chat/completions"),
    }
    input: str | Many[int] | Many[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 63)
    metadata: dict[str, Any] | None = None
    include: Many[str] | None = None
    top_logprobs: int | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)  # of tools that the server runs; there are none
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The token ids of a rendered prompt, if the input is one.

        Raises:
            InputError: the request has fields that only a chat template can write into the prompt.
        """
        if isinstance(self.input, str) or not isinstance(self.input[0], int):
            return None
        for name in ("instructions", "tools", "chat_template_kwargs", "reasoning"):
            if getattr(self, name):
                reason = "<<param>> cannot be added to an input of token ids, which is used as it is"
                raise InputError(f"{reason}; put the tokens of <<param>> into the input, or send messages", param=name)
        return self.input

    def after(self, turns: Sequence[dict[str, Any]]) -> ResponsesBody:
        """Return the same request with the items of earlier turns before its own.

        Raises:
            InputError: the input is token ids.
        """
        if self.prompt_token_ids is not None:
            reason = "<<param>> needs an input of messages, not of token ids"
            raise InputError(reason, code="invalid_value", param="previous_response_id")
        return self.model_copy(update={"input": [*turns, *stored_items(self.input)]})  # type: ignore[arg-type]

    @property
    def starts(self) -> list[int]:
        """The items that the input may begin with: the first one, and with truncation="auto" the first ones of later turns.

        Each leaves out twice as many turns as the one before it, so that few of them are tried; the last one is the last turn.
        """
        items: Any = [] if isinstance(self.input, str) or self.prompt_token_ids is not None else self.input
        if self.truncation != "auto" or not items:
            return [0]
        turns = [index for index, item in enumerate(items) if item.get("role") == "user"][1:]
        counts = [(1 << power) - 1 for power in range(len(turns).bit_length())]
        return [0, *(turns[count] for count in counts if count < len(turns) - 1), *turns[-1:]]

    def chat_body(self, signer: ReasoningSigner, start: int = 0) -> tuple[ChatBody, dict[str, str]]:
        """Return the same request to /v1/chat/completions, and the places of its messages in this body.

        Args:
            signer: reads the `encrypted_content` of reasoning.
            start: the first item of the input; those before it are left out, except messages of the system.

        Raises:
            InputError: a field has another form or cannot be honoured.
        """
        for name in _ECHOED:
            _check_json(name, getattr(self, name))
        for name in self.include or ():
            if name not in _INCLUDE:
                raise InputError(
                    f"include has {short_repr(name, 100)}; {hint(name, _INCLUDE)}",
                    code="unknown_name",
                    value=name,
                    param="include",
                )
            if _INCLUDE[name]:
                raise InputError(f"include has {name}: {_INCLUDE[name]}; leave it out", param="include")
        with_logprobs = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name not in self.refused}
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        places = {"messages": "input"} | ({"messages[0]": "instructions"} if system else {})
        if isinstance(self.input, str):
            items, param_names = [{"role": "user", "content": self.input}], {f"messages[{len(system)}]": "input"}
        elif self.prompt_token_ids is not None:
            items, param_names = [], {"prompt_token_ids": "input", "prompt": "input"}
        else:
            items, param_names = read_items(self.input, signer, len(system), start)  # type: ignore[arg-type]
        computed = {
            "messages": [*system, *items],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": with_logprobs,
            "top_logprobs": self.top_logprobs if with_logprobs else None,
            "tools": [chat_tool(tool, index) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self._effort(),
            "verbosity": self._verbosity(),
            "response_format": self._format(),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_construct(**{**shared, **computed}), places | param_names

    def _effort(self) -> Any:
        reasoning = self.reasoning or {}
        check_fields(reasoning, ("effort", *_REASONING), "reasoning", "reasoning")
        check_refused(reasoning, _REASONING, "reasoning", "reasoning")
        effort = reasoning.get("effort")
        if not (effort is None or isinstance(effort, str)):
            raise InputError(
                f"reasoning.effort is {short_repr(effort)}; give a string", code="invalid_value", param="reasoning"
            )
        return effort

    def _verbosity(self) -> Any:
        value = (self.text or {}).get("verbosity")
        if value not in (None, *VERBOSITIES):
            raise InputError(f"text.verbosity is {short_repr(value)}; give {', '.join(VERBOSITIES)}", param="text")
        return value

    def _format(self) -> dict[str, Any] | None:
        """Return text.format in the form of chat's response_format."""
        check_fields(self.text or {}, ("format", "verbosity"), "text", "text")
        text_format = (self.text or {}).get("format")
        kind = text_format.get("type") if isinstance(text_format, dict) else None
        if text_format is None:
            return None
        if kind in ("text", "json_object"):
            check_fields(text_format, ("type",), "text.format", "text")
            return {"type": kind}
        if kind != "json_schema" or not isinstance(text_format.get("schema"), dict):
            how = '{"type": "json_schema", "name": ..., "schema": {...}}, {"type": "json_object"} or {"type": "text"}'
            raise InputError(f"text.format is {short_repr(text_format)}; give {how}", param="text")
        check_fields(text_format, ("type", "name", "description", "schema", "strict"), "text.format", "text")
        return {"type": kind, "json_schema": text_format}


def _check_json(name: str, value: object) -> None:
    """Check that a response can contain a value of its request."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise InputError(
            "<<param>> has NaN, infinity, half a character or too many levels; leave them out", param=name
        ) from None


class InputTokensBody(ResponsesBody):
    """The body of /v1/responses/input_tokens."""

    refused: ClassVar[Refused] = {**ResponsesBody.refused, "personality": ((), "give instructions")}
