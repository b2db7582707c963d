"""Chat messages to prompt segments: content parts, the checkpoint's template, user text that stays text. Knows no family."""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..mm.errors import CheckpointError, InputError
from .text import Tokenizer

PART_TYPES = ("text", "image", "image_url", "video", "video_url")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
_ROOTS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered prompt. Special tokens count within a segment, never across two: user text is cut there."""

    text: str


@dataclass(frozen=True)
class RenderedChat:
    """Segments in order, and the media parts of the messages as `(modality, value)` in order."""

    segments: tuple[Segment, ...]
    media: tuple[tuple[str, Any], ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def multi_modal_data(self) -> dict[str, list[Any]]:
        """The media by modality, as `generate` takes it."""
        data: dict[str, list[Any]] = {}
        for modality, value in self.media:
            data.setdefault(modality, []).append(value)
        return data


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> RenderedChat:
    """Render OpenAI-style messages with a checkpoint's Jinja template, sandboxed.

    Text without special tokens goes through the template untouched, so that the prompt equals transformers'. A
    special token spelled in a message, tool or variable is cut in two by a random mark, which the template cannot tell
    from text, and the prompt becomes two segments there. `variables` are handed to the template.

    Raises:
        InputError: messages or parts of a wrong form, or a template that refuses them.
    """
    plain, media = split_media(messages)
    mark = secrets.token_hex(16)
    literals = tuple(tokenizer.specials)
    safe = [_cut(message, literals, mark) for message in plain]
    given = _cut({**variables, "tools": tools}, literals, mark)
    context = {**tokenizer.special_tokens, **given, "add_generation_prompt": add_generation_prompt, "messages": safe}
    text = _render(template, context)
    return RenderedChat(tuple(Segment(piece) for piece in text.split(mark)), tuple(media))


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a rendered prompt; nothing is added to it."""
    return tokenizer.encode_pieces([segment.text for segment in segments])


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, Any]]]:
    """Messages as templates take them (`{"type": "image"}` for a picture), and the media values in order."""
    media: list[tuple[str, Any]] = []
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise InputError(f"message {number}: an object with content and a role is expected, one of {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, str) or content is None:
            plain.append({**message, "content": content or ""})
        elif isinstance(content, Sequence):
            plain.append(
                {**message, "content": [_part(part, f"message {number} part {i}", media) for i, part in enumerate(content)]}
            )
        else:
            raise InputError(f"message {number}: content is text or a list of parts, not a {type(content).__name__}")
    return plain, media


def _part(part: object, where: str, media: list[tuple[str, Any]]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in PART_TYPES:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InputError(f"{where}: unknown part type {str(kind)[:40]!r}; the known ones are {', '.join(PART_TYPES)}")
    kind = str(part["type"])
    if kind not in part:
        raise InputError(f"{where}: a part of type {kind} has a field {kind!r}")
    if kind == "text":
        if not isinstance(part["text"], str):
            raise InputError(f"{where}: text is a string, not a {type(part['text']).__name__}")
        return {"type": "text", "text": part["text"]}
    media.append((_ROOTS[kind], _url(part[kind], kind, where) if kind.endswith("_url") else _value(part[kind], kind, where)))
    return {"type": _ROOTS[kind]}


def _url(value: object, kind: str, where: str) -> str:
    if not isinstance(value, Mapping) or not isinstance(value.get("url"), str):
        raise InputError(f'{where}: {kind} is an object {{"url": "data:..."}}, not a {type(value).__name__}')
    return str(_value(value["url"], kind, where))


def _value(value: object, kind: str, where: str) -> object:
    if isinstance(value, str) and not isinstance(value, os.PathLike) and not value.startswith("data:"):
        raise InputError(f"{where}: {kind} takes data: URLs only (fetching and paths as text are off); give bytes or a Path")
    return value


def _cut(value: Any, literals: tuple[str, ...], mark: str) -> Any:
    """The same nesting with a mark inside every special token that its strings spell, or could spell with a neighbour."""
    if isinstance(value, str):
        return _cut_text(value, literals, mark)
    if isinstance(value, Mapping):
        return {_cut(key, literals, mark): _cut(entry, literals, mark) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(entry, literals, mark) for entry in value]
    return value


def _cut_text(text: str, literals: tuple[str, ...], mark: str) -> str:
    cuts = set()
    for literal in literals:
        start = text.find(literal)
        while start >= 0:
            cuts.add(start + 1 if len(literal) > 1 else start)
            cuts.add(start + len(literal))
            start = text.find(literal, start + 1)
        if any(text.startswith(literal[i:]) for i in range(1, len(literal))):
            cuts.add(0)
        if any(text.endswith(literal[:i]) for i in range(1, len(literal))):
            cuts.add(len(text))
    for cut in sorted(cuts, reverse=True):
        text = text[:cut] + mark + text[cut:]
    return text


def _render(template: str, context: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    compiled = _compiled(template)
    try:
        return str(compiled.render(**context))
    except TemplateError as error:
        raise InputError(f"the chat template refuses the messages: {error}") from None
    except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise InputError(f"the chat template cannot take these messages: {error}") from None


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
    """Compiled as published templates expect: trimmed blocks, loop controls, a few helpers; nothing can be mutated."""
    import jinja2.ext
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks an assistant's words for training; here only its body counts."""

        tags = {"generation"}  # noqa: RUF012

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
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
