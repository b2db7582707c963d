"""Rendering of chat messages with the checkpoint's template, in which user text cannot form special tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ...mm.errors import InputError, check_utf8, clip, short_repr, typed
from ...mm.hashing import MAX_DEPTH
from ...mm.types import Media
from .message_parts import split_media
from .template import load_template
from .template_text import TemplateText
from .tokenizer import Tokenizer


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
    **variables: Any,
) -> RenderedChat:
    """Render OpenAI-style messages with a checkpoint's Jinja template, sandboxed.

    The template sees the texts unchanged, so the prompt equals transformers'. It is split into segments that the template wrote
    and segments that come from a message, a tool or a variable, however the template changed them; see `TemplateText`.

    With `continue_final_message` the prompt ends with the text of the last message, which the model continues. With
    `max_model_len`, messages whose texts cannot fit are refused before they are rendered.

    Raises:
        InputError: messages or parts of a wrong form, texts too long, or a template that refuses them.
    """
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other; turn one of them off",
            param="continue_final_message",
        )
    plain, media = split_media(messages)
    if max_model_len is not None:
        _check_length(plain, tokenizer, max_model_len)
    safe = [_plain(message, f"messages[{i}]") for i, message in enumerate(plain)]
    for message in safe:  # roles and types are names that we know
        message["role"] = TemplateText.written(message["role"])
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            part["type"] = TemplateText.written(part["type"])
    end = secrets.token_hex(16) + " "
    last = _leave_open(safe, end) if continue_final_message else ""
    special = {name: TemplateText.written(text) for name, text in tokenizer.special_tokens.items()}
    given = {name: _plain(value, name) for name, value in {**variables, "tools": tools}.items()}
    context = {**special, **given, "add_generation_prompt": add_generation_prompt, "messages": safe}
    text = _render(template, context, tokenizer.max_characters(max_model_len), max_seconds)
    if continue_final_message:
        text = _up_to(text, last, end)
    return RenderedChat(text.pieces(), tuple(media))


def _check_length(messages: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, most: int) -> None:
    contents = [message.get("content", "") for message in messages]
    texts = [
        part.get("text", "") for content in contents for part in ([{"text": content}] if isinstance(content, str) else content)
    ]
    least = sum(map(tokenizer.min_tokens, texts)) - len(texts)  # the ends of two texts may share a token
    if least >= most:
        raise InputError(f"the messages have at least {least} tokens, max_model_len is {most}; shorten them", code="too_long")


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
        raise InputError(
            "continue_final_message: the chat template leaves out or changes the last message", param="continue_final_message"
        )
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


def _render(template: str, context: dict[str, Any], most: int, max_seconds: float) -> TemplateText:
    sandbox = load_template(template)
    try:
        return sandbox.render(context, most, max_seconds)
    except InputError:
        raise
    except TemplateError as error:
        reason = f"the chat template refuses the messages: {clip(str(error), 200)}"
        raise InputError(reason, param="messages") from None
    except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        reason = f"the chat template cannot take these messages: {clip(str(error), 200)}"
        raise InputError(reason, param="messages") from None
