"""The bodies of Ollama's /api/chat, /api/generate and /api/show, and their translation into a chat request.

Source of the fields: the types `ChatRequest`, `GenerateRequest` and `Options` of the `ollama` package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...callers.errors import InputError, short_repr
from ...callers.message_fields import check_fields
from .body import IGNORED, Body, Many, Part, Refused
from .chat import ChatBody

LATEST = ":latest"
"""The tag that Ollama's clients add to a model's name without one."""
_ONE_ANSWER = "answers are text"
_MESSAGE = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")
_FIELDS = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "stop"), ""),
    **{"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"},
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ""),
}
"""Field of a chat request -> the option with its value, "" for one of the same name."""


class Options(Part):
    """Sampling parameters. Options about loading a model have no effect: the server has loaded it."""

    refused: ClassVar[Refused] = {
        "tfs_z": ((1, 1.0), "there is no tail-free sampling; give top_p or min_p"),
        "typical_p": ((1, 1.0), "there is no typical sampling; give top_p or min_p"),
        "mirostat": ((0,), "there is no Mirostat sampling; give temperature and top_p"),
        "repeat_last_n": ((-1,), "penalties count the whole context"),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep", "penalize_newline"),
        *("mirostat_tau", "mirostat_eta", "draft_num_predict"),
    )
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | Many[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of a chat request. A negative `num_predict` is no limit; a negative `seed` is none."""
        fields = {name: getattr(self, option or name) for name, option in _FIELDS.items()}
        for name in ("max_tokens", "seed"):
            if fields[name] is not None and fields[name] < 0:
                fields[name] = None
        return fields


class AnswerBody(Body):
    """Fields of /api/chat and /api/generate."""

    refused: ClassVar[Refused] = {
        "template": (("",), "the server's chat template is used; start it with --chat-template"),
        "suffix": (("",), "there is no infilling; write the model's own tokens for it into a raw prompt"),
        "context": (([],), "send the conversation to /api/chat"),
        **dict.fromkeys(("width", "height", "steps"), ((0,), _ONE_ANSWER)),
    }
    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "keep_alive", "truncate", "shift")
    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in chunks, as it does by default."""
        return self.stream is not False

    @property
    def served_model(self) -> str:
        return self.model.removesuffix(LATEST)

    def chat_with(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> ChatBody:
        """Return a request to /v1/chat/completions with these messages."""
        requested, think = self.format, self.think
        answer_format: dict[str, Any] | None = {"type": "json_object"} if requested == "json" else None
        if isinstance(requested, dict):
            answer_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": requested}}
        return ChatBody.model_construct(
            **(self.options or Options()).chat_fields(),
            model=self.served_model,
            messages=[*messages],
            tools=tools,
            stream=self.streams,
            response_format=answer_format,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            reasoning_effort=think if isinstance(think, str) else None,
            include_reasoning=None if think is None else bool(think),
            chat_template_kwargs={} if think is None else dict.fromkeys(("enable_thinking", "thinking"), bool(think)),
        )

    @property
    def places(self) -> dict[str, str]:
        """Fields of the chat request that are elsewhere in this one."""
        options = {name: f"options.{option or name}" for name, option in _FIELDS.items()}
        return {**options, "response_format": "format", "structured_outputs": "format"}


class OllamaChatBody(AnswerBody):
    messages: Many[dict[str, Any]] = Field(default_factory=list)
    tools: Many[dict[str, Any]] | None = None

    def chat_body(self) -> tuple[ChatBody, dict[str, str]]:
        """Return the same request to /v1/chat/completions, and the places of its fields in this body.

        Raises:
            InputError: a message has another form.
        """
        calls: list[tuple[str, str]] = []
        messages = [_read_message(message, index, calls) for index, message in enumerate(self.messages)]
        places = {
            f"messages[{index}].content[{number}]": f"messages[{index}].images[{number}]"
            for index, message in enumerate(self.messages)
            for number in range(len(message.get("images") or ()))
        }
        return self.chat_with(messages, self.tools), {**self.places, **places}


class GenerateBody(AnswerBody):
    """`raw`: the prompt is used as it is, without the chat template."""

    prompt: str = ""
    system: str | None = None
    images: Many[str] | None = None
    raw: bool | None = None

    def chat_body(self) -> tuple[ChatBody, dict[str, str]]:
        """Return the same request to /v1/chat/completions, and the places of its fields in this body.

        Raises:
            InputError: a raw prompt has fields that only a chat template can write into it.
        """
        for name in ("system", "images", "think") if self.raw else ():
            if getattr(self, name):
                reason = "<<param>> cannot be added to a raw prompt"
                raise InputError(f"{reason}; leave out raw, or remove <<param>>", code="invalid_value", param=name)
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": _content(self.prompt, self.images or ())}
        index = len(system)
        places = {f"messages[{index}].content[{number}]": f"images[{number}]" for number in range(len(self.images or ()))}
        return self.chat_with([*system, user], None), {**self.places, **places, f"messages[{index}]": "prompt"}


class EmbedBody(Body):
    """The body of /api/embed. Options of generation have no effect on vectors."""

    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "keep_alive", "options")
    model: str
    input: str | Many[str]
    truncate: bool | None = None
    dimensions: int | None = None


class EmbeddingsBody(Body):
    """The body of the older /api/embeddings, which embeds one text."""

    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "keep_alive", "options")
    model: str
    prompt: str


class ShowBody(Body):
    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, "verbose", "name")
    model: str


def _read_message(message: Mapping[str, Any], index: int, calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Return a message of a chat request. `calls`: (name, id) of the calls so far that have no result."""
    where = f"messages[{index}]"
    check_fields(message, _MESSAGE, where, where)
    content, images = message.get("content"), message.get("images") or ()
    listed = isinstance(images, list | tuple) and all(isinstance(image, str) for image in images)
    if not isinstance(content, str | None) or not listed:
        raise InputError(f"{where} must have a text as content, and a list of base64 texts as images", param=where)
    chat_message: dict[str, Any] = {"role": message.get("role"), "content": _content(content or "", images)}
    if message.get("thinking") is not None:
        chat_message["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        chat_message["tool_calls"] = _read_calls(message["tool_calls"], index, calls)
    if message.get("role") == "tool":
        name, call_id = message.get("tool_name"), message.get("tool_call_id")
        call = next(
            (
                known_call
                for known_call in calls
                if call_id == known_call[1] or (call_id is None and name in (None, known_call[0]))
            ),
            None,
        )
        if call is not None:
            calls.remove(call)
        chat_message["tool_call_id"] = call_id or (call[1] if call else "")
        if isinstance(name, str):
            chat_message["name"] = name
    return chat_message


def _content(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return text and images as the content of a message, the images first, as Ollama has them."""
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text


def _read_calls(value: Any, index: int, calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    tool_calls = []
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        path = f"messages[{index}].tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else ("", None)
        if not isinstance(function, Mapping) or not (isinstance(name, str) and name) or not isinstance(arguments, Mapping):
            shape = '{"function": {"name": ..., "arguments": {...}}}'
            raise InputError(f"<<param>> is {short_repr(call)}; give {shape}", code="invalid_value", param=path)
        check_fields(call, ("type", "id", "function"), path, path)
        check_fields(function, ("name", "arguments", "index"), f"{path}.function", path)
        call_id = call.get("id") or f"call_{index}_{number}"
        calls.append((name, call_id))
        text = json.dumps(arguments, ensure_ascii=False)
        tool_calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return tool_calls
