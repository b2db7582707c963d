"""Rendering of chat messages with the checkpoint's template, in which user text cannot form special tokens."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from ...mm.errors import CheckpointError, InputError, typed
from ...mm.hashing import MAX_DEPTH
from ...mm.types import Media
from .message_parts import split_media
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class RenderedChat:
    """A rendered prompt and the media parts of its messages, `(modality, Media)` in order.

    Special tokens are recognised within a segment of the text and never across two: user text is cut inside them.
    """

    segments: tuple[str, ...]
    media: tuple[tuple[str, Media], ...]

    @property
    def text(self) -> str:
        return "".join(self.segments)

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
    **variables: Any,
) -> RenderedChat:
    """Render OpenAI-style messages with a checkpoint's Jinja template, sandboxed.

    Text without special tokens is passed to the template unchanged, so the prompt equals transformers'. A special token
    spelled in a message, tool or variable is cut in two by a random mark, which the template treats as text; the prompt is
    split into segments there. `tools` and `variables` are passed to the template.

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
    mark = secrets.token_hex(16)
    literals = tuple(tokenizer.specials)
    safe = [_cut(message, literals, mark) for message in plain]
    end = secrets.token_hex(16) + " "
    last = _leave_open(safe, end) if continue_final_message else ""
    given = _cut({**variables, "tools": tools}, literals, mark)
    context = {**tokenizer.special_tokens, **given, "add_generation_prompt": add_generation_prompt, "messages": safe}
    text = _render(template, context)
    if continue_final_message:
        text = _up_to(text, last, end)
    return RenderedChat(tuple(text.split(mark)), tuple(media))


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


def _up_to(rendered: str, last: str, end: str) -> str:
    """Return the prompt up to the mark. The space after the mark is missing if the template trims the end of texts."""
    if last.strip() not in rendered or end.strip() not in rendered:
        raise InputError(
            "continue_final_message: the chat template leaves out or changes the last message", param="continue_final_message"
        )
    place = rendered.rindex(end.strip())
    return rendered[:place] if rendered.startswith(end, place) else rendered[:place].rstrip()


def _cut(value: Any, literals: tuple[str, ...], mark: str, depth: int = 0) -> Any:
    """Return a copy with a mark inside every special token that its strings spell, or could spell with adjacent text."""
    if isinstance(value, str):
        return _cut_text(value, literals, mark)
    if depth > MAX_DEPTH:
        raise InputError(f"messages, tools and template variables nest at most {MAX_DEPTH} deep; give flatter ones")
    if isinstance(value, Mapping):
        return {_cut(key, literals, mark): _cut(entry, literals, mark, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(entry, literals, mark, depth + 1) for entry in value]
    if value is None or isinstance(value, int | float):
        return value
    raise InputError(f"messages, tools and template variables hold text, numbers, lists and objects, not {typed(value)}")


def _cut_text(text: str, literals: tuple[str, ...], mark: str) -> str:
    edges = _edges(literals)
    cuts = set()
    for literal in (literal for head, several in edges.groups.items() if head in text for literal in several):
        start = text.find(literal)
        while start >= 0:
            cuts.add(start + 1 if len(literal) > 1 else start)
            cuts.add(start + len(literal))
            start = text.find(literal, start + 1)
    for length in range(1, min(len(text), edges.longest) + 1):
        if text[:length] in edges.ends:
            cuts.add(0)
        if text[-length:] in edges.starts:
            cuts.add(len(text))
    return mark.join(text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])) if cuts else text


@dataclass(frozen=True)
class _Edges:
    """Special tokens by their first characters (a thousand may share them), and all their proper prefixes and suffixes."""

    groups: Mapping[str, Sequence[str]]
    starts: frozenset[str]
    ends: frozenset[str]
    longest: int


@functools.lru_cache(maxsize=8)
def _edges(literals: tuple[str, ...]) -> _Edges:
    groups: dict[str, list[str]] = {}
    for literal in literals:
        groups.setdefault(literal[:4], []).append(literal)
    starts = frozenset(literal[:i] for literal in literals for i in range(1, len(literal)))
    ends = frozenset(literal[i:] for literal in literals for i in range(1, len(literal)))
    return _Edges(groups, starts, ends, max(map(len, starts), default=0))


def _render(template: str, context: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    compiled = _compiled(template)
    try:
        return str(compiled.render(**context))
    except TemplateError as error:
        raise InputError(f"the chat template refuses the messages: {error}", param="messages") from None
    except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise InputError(f"the chat template cannot take these messages: {error}", param="messages") from None


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
    """Compile a template, sandboxed, with the settings and helpers that published templates expect."""
    import jinja2.ext
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks an assistant's text for training; it is rendered as its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replace Jinja's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
