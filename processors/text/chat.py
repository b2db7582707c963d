"""Rendering of chat messages with the checkpoint's template, in which user text cannot form special tokens."""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...callers.errors import InputError
from ...callers.message_fields import check_messages
from ...callers.pacing import releasing_gil
from ...callers.plain import builtin_copy
from ...mm.media.isolate import call_worker
from ...mm.media.policy import DEFAULT_POLICY, MediaPolicy
from ...mm.tenants import tenant_of
from ...mm.types import Media
from .message_parts import split_media
from .rendering import RenderInputs, plain_copy, render, render_alone, texts

_MAX_TOKENS = 1 << 20  # of a prompt, if max_model_len is not given
_WORKER_MEMORY = 1 << 30


class TemplateTokenizer(Protocol):
    """The part of a Tokenizer that rendering needs."""

    special_tokens: Mapping[str, str]

    def max_characters(self, num_tokens: int | None) -> int: ...

    def min_tokens(self, text: str) -> int: ...


@dataclass(frozen=True)
class RenderedChat:
    """A rendered prompt and the media parts of its messages, `(modality, Media)` in order.

    `places`: the part of a message that holds each medium, such as "messages[0].content[1]".
    `segments`: text in order, each with True if the template wrote it. Control tokens are recognised in such text only.
    """

    segments: tuple[tuple[str, bool], ...]
    media: tuple[tuple[str, Media], ...]
    places: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def multi_modal_data(self) -> dict[str, list[Media]]:
        """The media by modality, as `generate` takes it."""
        data: dict[str, list[Media]] = {}
        for modality, value in self.media:
            data.setdefault(modality, []).append(value)
        return data


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    /,
    template: str,
    tokenizer: TemplateTokenizer,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    max_model_len: int | None = None,
    max_seconds: float = 10.0,
    placeholders: Mapping[str, str] | None = None,
    isolated: bool = False,
    cache_salt: str | None = None,
    require_sandbox: bool = False,
    policy: MediaPolicy = DEFAULT_POLICY,
    **variables: Any,
) -> RenderedChat:
    """Render OpenAI-style messages with a checkpoint's Jinja template, sandboxed.

    The template sees the texts unchanged, so the prompt equals transformers'. It is split into segments that the template wrote
    and segments that come from a message, a tool or a variable, however the template changed them; see `TemplateText`.
    Contents get the form that the template reads (a string or parts), as do the arguments of tool calls (JSON or an object).

    With `continue_final_message` the prompt ends with the text of the last message, which the model continues. With
    `max_model_len`, messages whose texts cannot fit are refused before they are rendered. `placeholders` are the texts that
    stand for items, by modality, in a template that reads strings. `isolated`: render in a worker process, which serves no
    other tenant (`cache_salt`); for templates that are not the checkpoint's. `require_sandbox`: refuse a worker
    whose system calls cannot be filtered. `policy`: limits of PDFs, which are opened in workers of this tenant, too.

    Raises:
        InputError: messages or parts of a wrong form, texts too long, or a template that refuses them or leaves a text out. The
            `param` is the argument, or the place in it: "messages[0].content[1]".
    """
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "<<param>> and add_generation_prompt exclude each other; turn one of them off",
            param="continue_final_message",
        )
    if max_model_len is not None:
        _check_count(messages, tools, max_model_len)
    copied = [builtin_copy(entry, f"messages[{i}]", f"message {i}") for i, entry in enumerate(releasing_gil(messages))]
    plain, media, places = split_media(copied, policy, tenant_of(cache_salt))
    check_messages(copied, template)
    if max_model_len is not None:
        _check_length(plain, tokenizer, max_model_len)
    inputs = RenderInputs(
        template,
        [plain_copy(message, f"messages[{i}]") for i, message in enumerate(plain)],
        {name: plain_copy(value, name) for name, value in {**variables, "tools": tools}.items()}
        | {"add_generation_prompt": add_generation_prompt},
        dict(tokenizer.special_tokens),
        dict(placeholders or {}),
        continue_final_message,
        tokenizer.max_characters(max_model_len),
        4 * (max_model_len or _MAX_TOKENS),
        max_seconds,
    )
    segments = _render_in_worker(inputs, tenant_of(cache_salt), require_sandbox) if isolated else render(inputs)
    return RenderedChat(segments, tuple(media), tuple(places))


def _render_in_worker(inputs: RenderInputs, tenant: str | None, require_sandbox: bool) -> tuple[tuple[str, bool], ...]:
    """Call `render` in a worker, because compiling or running a template may hold the interpreter's lock for seconds."""
    try:
        data, seconds = marshal.dumps(tuple(inputs)), inputs.max_seconds + 1.0
        reply = call_worker(render_alone, data, seconds, _WORKER_MEMORY, tenant, require_sandbox)
    except InputError:
        reply = None
    if reply is None or reply.kind != "value":
        reason = f"the chat template crashes, takes more than {inputs.max_seconds:g} s (<<max_template_seconds>>) or more than "
        reason += f"{_WORKER_MEMORY:,} bytes; shorten the messages or simplify the template"
        raise InputError(reason, param="chat_template")
    answer = msgspec.convert(reply.value, dict[str, Any])
    if "pieces" not in answer:
        if answer["code"] == "checkpoint":  # it cannot be compiled, and it is not the checkpoint's
            raise InputError(answer["text"], param="chat_template")
        raise InputError(**answer)
    return msgspec.convert(answer["pieces"], tuple[tuple[str, bool], ...])


def _check_count(messages: Sequence[object], tools: Sequence[object] | None, most: int) -> None:
    """Refuse very many messages, parts and tools before work is done for each."""
    count = len(messages) + len(tools or ())
    if count <= 4 * most:
        contents = [content.get("content") for content in messages if isinstance(content, Mapping)]
        count += sum(len(content) for content in contents if isinstance(content, list))
    if count > 4 * most:
        reason = f"<<max_model_len=>>{most} allows {4 * most} messages, parts and tools; the conversation has {count}"
        raise InputError(f"{reason}; shorten it", code="too_long", param="messages", limit=4 * most, value=count)


def _check_length(messages: Iterable[Mapping[str, Any]], tokenizer: TemplateTokenizer, most: int) -> None:
    strings = [text for message in messages for text in texts(message)]
    least = sum(map(tokenizer.min_tokens, strings)) - len(strings)  # the ends of two texts may share a token
    if least >= most:
        reason = f"the messages have at least {least} tokens, but <<max_model_len>> is {most}; shorten them"
        raise InputError(reason, code="too_long", param="messages", limit=most, value=least)
