"""Rendering of chat messages with the checkpoint's template, in which user text cannot form special tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ...mm.errors import InputError, check_utf8, clip, one_line, short_repr, typed
from ...mm.hashing import MAX_DEPTH
from ...mm.types import Media
from .message_parts import split_media
from .template import Sandbox, load_template
from .template_text import TemplateText
from .tokenizer import Tokenizer

_FORMS = {"string": ("string", "parts"), "parts": ("parts", "text"), "any": ("any", "text", "parts")}
"""The forms of contents to try, by what the template reads. "any": as given; "text": parts only where there are items."""
_CHANGED = re.compile(r"(?:^|(?<=\s))/\w+|<[^<>\s]{1,40}>")  # switches and tags


class _FormError(Exception):
    """A template does not take contents of this form."""


class _Parts(list[Any]):
    """The parts of a content, which a template may read but not print."""

    def __str__(self) -> str:
        raise TypeError("it prints a list of parts as if it were text")


@dataclass(frozen=True)
class RenderedChat:
    """A rendered prompt and the media parts of its messages, `(modality, Media)` in order.

    `segments`: text in order, each with True if the template wrote it. Control tokens are recognised in such text only.
    """

    segments: tuple[tuple[str, bool], ...]
    media: tuple[tuple[str, Media], ...]

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
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    max_model_len: int | None = None,
    max_seconds: float = 10.0,
    placeholders: Mapping[str, str] | None = None,
    **variables: Any,
) -> RenderedChat:
    """Render OpenAI-style messages with a checkpoint's Jinja template, sandboxed.

    The template sees the texts unchanged, so the prompt equals transformers'. It is split into segments that the template wrote
    and segments that come from a message, a tool or a variable, however the template changed them; see `TemplateText`.
    Contents are converted to the form that the template reads, a string or a list of parts, and so are the arguments of
    tool calls, JSON or an object.

    With `continue_final_message` the prompt ends with the text of the last message, which the model continues. With
    `max_model_len`, messages whose texts cannot fit are refused before they are rendered. `placeholders` are the texts that
    stand for items, by modality, in a template that reads strings.

    Raises:
        InputError: messages or parts of a wrong form, texts too long, or a template that refuses them or leaves a text out.
    """
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other; turn one of them off",
            param="continue_final_message",
        )
    plain, media = split_media(messages)
    if max_model_len is not None:
        _check_length(plain, tokenizer, max_model_len)
    sandbox = load_template(template)
    safe = [
        _plain(_with_arguments(message, i, sandbox.reads.text_arguments), f"messages[{i}]") for i, message in enumerate(plain)
    ]
    for message in safe:  # roles and types are names that we know
        message["role"] = TemplateText.written(message["role"])
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            part["type"] = TemplateText.written(part["type"])
    special = {name: TemplateText.written(text) for name, text in tokenizer.special_tokens.items()}
    given = {name: _plain(value, name) for name, value in {**variables, "tools": tools}.items()}
    context = {**special, **given, "add_generation_prompt": add_generation_prompt}
    limits = tokenizer.max_characters(max_model_len), max_seconds
    text = _render(sandbox, safe, context, placeholders or {}, continue_final_message, limits)
    return RenderedChat(text.pieces(), tuple(media))


def _check_length(messages: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, most: int) -> None:
    texts = [text for message in messages for text in _texts(message)]
    least = sum(map(tokenizer.min_tokens, texts)) - len(texts)  # the ends of two texts may share a token
    if least >= most:
        raise InputError(f"the messages have at least {least} tokens, max_model_len is {most}; shorten them", code="too_long")


def _with_arguments(message: dict[str, Any], number: int, as_text: bool) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text or as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return message | {"tool_calls": [_call_with_arguments(call, f"message {number}", as_text) for call in calls]}


def _call_with_arguments(call: Any, where: str, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_arguments(call["function"], where, as_text)}
    arguments = call.get("arguments")
    try:
        if as_text and isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not as_text and isinstance(arguments, str):
            return {**call, "arguments": json.loads(arguments or "{}")}
    except (TypeError, ValueError, RecursionError):
        reason = f"{where}: the arguments of a tool call are no JSON ({short_repr(arguments, 40)}); give an object or its JSON"
        raise InputError(reason, param="messages") from None
    return call


def _leave_open(messages: Sequence[dict[str, Any]], end: str) -> str:
    """Append a mark to the last text of the last message, and return that text."""
    content = messages[-1].get("content") if messages else None
    texts = [part for part in content if "text" in part] if isinstance(content, list) else []
    holder, key = (messages[-1], "content") if isinstance(content, str) else (texts[-1] if texts else {}, "text")
    if key not in holder:
        raise InputError("continue_final_message: the last message has no text to continue", param="continue_final_message")
    text = str(holder[key])
    holder[key] = text + end
    return text


def _up_to(rendered: TemplateText, last: str, end: str) -> TemplateText:
    """Return the prompt up to the mark. The space after the mark is missing if the template trims the end of texts."""
    if last.strip() not in rendered or end.strip() not in rendered:
        raise _FormError("continue_final_message: the chat template leaves out or changes the last message")
    place = rendered.rindex(end.strip())
    return rendered[:place] if rendered.startswith(end, place) else rendered[:place].rstrip()


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a copy with plain texts, which count as the caller's. `name`: for errors."""
    if isinstance(value, str):
        return check_utf8(value if type(value) is str else str.__str__(value), name)
    if depth > MAX_DEPTH:
        raise InputError(f"messages, tools and template variables nest at most {MAX_DEPTH} deep; give flatter ones")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int | float | None) for key in value):
            raise InputError(f"{name}: keys are texts or numbers; give no others")
        return {
            _plain(key, name): _plain(entry, f"{name}.{short_repr(str(key), 40)[1:-1]}", depth + 1)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{name}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if value is None or isinstance(value, int | float):
        return value
    raise InputError(f"messages, tools and template variables hold text, numbers, lists and objects, not {typed(value)}")


def _render(
    sandbox: Sandbox,
    messages: Sequence[dict[str, Any]],
    context: Mapping[str, Any],
    placeholders: Mapping[str, str],
    leave_open: bool,
    limits: tuple[int, float],
) -> TemplateText:
    """Render messages in the form that the template reads; if it fails or leaves out a text, in the other forms."""
    failure = ""
    for form in _FORMS[sandbox.reads.content]:
        try:
            converted = [{**one, **_content(one, number, form, placeholders)} for number, one in enumerate(messages)]
            end = secrets.token_hex(16) + " "
            last = _leave_open(converted, end) if leave_open else ""
            text = sandbox.render({**context, "messages": converted}, *limits)
            if leave_open:
                text = _up_to(text, last, end)
            _check_texts(messages, text)
            return text
        except _FormError as error:
            failure = failure or str(error)
        except InputError:
            raise
        except TemplateError as error:
            failure = failure or f"the chat template refuses the messages: {clip(str(error), 200)}"
        except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            failure = failure or f"the chat template cannot take these messages: {clip(str(error), 200)}"
    raise InputError(failure, param="messages")


def _content(message: Mapping[str, Any], number: int, form: str, placeholders: Mapping[str, str]) -> dict[str, Any]:
    """Return a message's content in a form of `_FORMS`, under its key; empty for a message without content."""
    content = message.get("content")
    if isinstance(content, str) and form == "parts":
        return {"content": _Parts([{"type": TemplateText.written("text"), "text": content}])}
    if not isinstance(content, list):
        return {}
    media = [part["type"] for part in content if part["type"] != "text"]
    if form in ("any", "parts") or (form == "text" and media):
        return {"content": _Parts(map(dict, content))}
    for modality in media:
        if modality not in placeholders:
            reason = f"message {number}: the chat template reads texts only, so it has no place for an item"
            raise _FormError(f"{reason} ({modality}); pass another chat_template")
    texts = [part.get("text") or TemplateText.written(placeholders.get(part["type"], "")) for part in content]
    return {"content": TemplateText("\n").join(texts)}


def _check_texts(messages: Iterable[Mapping[str, Any]], prompt: TemplateText) -> None:
    """Refuse a prompt that lacks the text of a message.

    Templates may change spaces, leave out thoughts, tags and switches such as /no_think, and write texts as JSON.
    """
    whole, start = one_line(str.__str__(prompt)), 0
    for number, message in enumerate(messages):
        for text in _texts(message):
            if message["role"] == "assistant":
                text = text.rpartition("</think>")[2]
            for piece in map(str.strip, _CHANGED.split(text)):
                escaped = json.dumps(piece, ensure_ascii=False)[1:-1]
                places = (whole.find(one_line(piece), start), whole.find(one_line(piece)), whole.find(one_line(escaped)))
                start = next((place for place in places if place >= 0), -1)
                if start < 0:
                    reason = f"message {number}: the chat template leaves out or changes its text"
                    raise _FormError(f"{reason}; leave that text out, or pass another chat_template")


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content", "")
    for part in [{"text": content}] if isinstance(content, str) else content:
        if "text" in part:
            yield str.__str__(part["text"])
