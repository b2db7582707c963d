"""Renders chat templates, in this process or in a worker. It imports no torch, so that the worker starts faster."""

from __future__ import annotations

import json
import marshal
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from ...callers.errors import MAX_DEPTH, InputError, SensoriumError, check_utf8, clip, one_line, short_repr, typed
from ...callers.pacing import releasing_gil
from .content_format import REASONING_FIELDS
from .template import Sandbox, load_template
from .template_text import TemplateText

WORKER_IMPORTS = ("encodings.unicode_escape", "jinja2.debug", "unicodedata")  # imported by Jinja on first use


_FORMS = {"string": ("string", "parts"), "parts": ("parts", "text"), "any": ("any", "text", "parts")}
"""`TemplateFormat.content` -> forms of contents to try, in order.

"any" leaves a content unchanged. "parts" turns a string into a list of one part. "string" turns a list of parts into a string;
"text" does so only if all parts are texts.
"""
_MAX_SEARCHES = 100  # searches of a whole prompt for a piece of text
_CHANGED = re.compile(r"(?:^|(?<=\s))/\w+|<[^<>\s]{1,40}>")  # switches (/no_think) and tags (<think>)


class _FormError(Exception):
    """A template does not take contents of this form. `place`: the message at fault, such as "messages[0]"."""

    def __init__(self, reason: str, param: str) -> None:
        super().__init__(reason)
        self.place = param


class _Parts(list[Any]):
    """The parts of a content, which a template may read but not print."""

    def __str__(self) -> str:
        raise TypeError("it prints a list of parts as if it were text")


class RenderInputs(NamedTuple):
    """A template, what it renders, and limits. All values are plain data.

    Args:
        variables: names of the template, besides the special tokens and "messages".
        placeholders: texts that stand for items, by modality.
        leave_open: the prompt ends with the text of the last message.
        max_pieces: largest number of pieces of the prompt, each of which takes about one token or more.
    """

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    special_tokens: dict[str, str]
    placeholders: dict[str, str]
    leave_open: bool
    max_characters: int
    max_pieces: int
    max_seconds: float


def render(inputs: RenderInputs) -> tuple[tuple[str, bool], ...]:
    """Return the prompt in pieces, each with True if the template wrote it.

    Raises:
        CheckpointError: the template cannot be compiled.
        InputError: the template refuses the messages, or exceeds a limit.
    """
    sandbox = load_template(inputs.template)
    if inputs.variables.get("tools") and not sandbox.reads.tools:
        raise InputError(
            "the chat template takes no tools; leave them out, or <<change_template>>", code="unsupported", param="tools"
        )
    messages = [
        _with_arguments(_with_reasoning(message, sandbox.reads.reasoning), i, sandbox.reads.text_arguments)
        for i, message in enumerate(inputs.messages)
    ]
    for message in messages:  # roles and types are names that we know
        message["role"] = TemplateText.written(message["role"])
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            part["type"] = TemplateText.written(part["type"])
    special = {name: TemplateText.written(text) for name, text in inputs.special_tokens.items()}
    limits = inputs.max_characters, inputs.max_seconds
    text = _render(sandbox, messages, {**special, **inputs.variables}, inputs.placeholders, inputs.leave_open, limits)
    if text.num_pieces > inputs.max_pieces:
        reason = f"the chat template switches between its own text and the messages' more than {inputs.max_pieces} times"
        raise InputError(f"{reason}; shorten the messages", code="too_long", param="chat_template", limit=inputs.max_pieces)
    return text.pieces()


def render_alone(data: bytes) -> dict[str, Any]:
    """Call `render` with inputs that `marshal` has written. Return the pieces, or an error's fields. Runs in a worker."""
    try:
        return {"pieces": render(RenderInputs(*marshal.loads(data)))}
    except SensoriumError as error:
        return error.info.fields()


def plain_copy(value: Any, name: str, depth: int = 0) -> Any:
    """Return a copy with plain texts, which count as the caller's. `name`: for errors."""
    if isinstance(value, str):
        return check_utf8(value if type(value) is str else str.__str__(value), name)
    if depth > MAX_DEPTH:
        reason = f"messages, tools and template variables nest at most {MAX_DEPTH} deep; give flatter ones"
        raise InputError(reason, param=name)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int | float | None) for key in value):
            raise InputError("<<param>>: keys must be strings or numbers", code="invalid_value", param=name)
        return {
            plain_copy(key, name): plain_copy(entry, f"{name}.{short_repr(str(key), 40)[1:-1]}", depth + 1)
            for key, entry in releasing_gil(value.items())
        }
    if isinstance(value, list | tuple):
        return [plain_copy(entry, f"{name}[{i}]", depth + 1) for i, entry in enumerate(releasing_gil(value))]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    reason = f"<<param>> is {typed(value)}; messages, tools and template variables may hold text, numbers, lists and objects"
    raise InputError(f"{reason}; give media as parts of a content", param=name)


def _with_reasoning(message: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the message with its reasoning in the fields that the template reads.

    gpt-oss's template, which reads `thinking` alone, has one place for the reasoning and for a text before a call, and refuses
    both.
    """
    if message.get("role") != "assistant" or not fields:
        return message
    reasoning = next((message[name] for name in REASONING_FIELDS if isinstance(message.get(name), str)), None)
    if tuple(fields) == ("thinking",) and message.get("tool_calls"):
        text = "\n".join(filter(None, [reasoning, *texts(message)])) if message.get("content") else reasoning
        return message | {"content": "", "thinking": text}
    if reasoning is None:
        return message
    return message | {name: reasoning for name in fields if message.get(name) is None}


def _with_arguments(message: dict[str, Any], number: int, as_text: bool) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text or as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return message | {"tool_calls": [_call_with_arguments(call, number, i, as_text) for i, call in enumerate(calls)]}


def _call_with_arguments(call: Any, number: int, index: int, as_text: bool) -> Any:
    """Return a call with its arguments as text or as an object. `number`: of the message; `index`: of its call."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_with_arguments(call["function"], number, index, as_text)}
    arguments, param = call.get("arguments"), f"messages[{number}].tool_calls[{index}]"
    try:
        if as_text and isinstance(arguments, Mapping):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not as_text and isinstance(arguments, str):
            return {**call, "arguments": plain_copy(json.loads(arguments or "{}"), param)}
    except (TypeError, ValueError, RecursionError):
        reason = f"the arguments of a tool call are not JSON ({short_repr(arguments, 40)}); give an object or its JSON"
        raise InputError(f"message {number}: {reason}", code="invalid_value", param=param) from None
    return call


def _leave_open(messages: Sequence[dict[str, Any]], end: str) -> str:
    """Append a mark to the last text of the last message, and return that text."""
    content = messages[-1].get("content") if messages else None
    texts = [part for part in content if "text" in part] if isinstance(content, list) else []
    holder, key = (messages[-1], "content") if isinstance(content, str) else (texts[-1] if texts else {}, "text")
    if key not in holder:
        raise InputError("<<param>>: the last message has no text to continue", param="continue_final_message")
    text = str(holder[key])
    holder[key] = text + end
    return text


def _up_to(rendered: TemplateText, last: str, end: str) -> TemplateText:
    """Return the prompt up to the mark. The space after the mark is missing if the template trims the end of texts."""
    if last.strip() not in rendered or end.strip() not in rendered:
        raise _FormError("continue_final_message: the chat template leaves out or changes the last message", "messages")
    position = rendered.rindex(end.strip())
    return rendered[:position] if rendered.startswith(end, position) else rendered[:position].rstrip()


def _render(
    sandbox: Sandbox,
    messages: Sequence[dict[str, Any]],
    context: Mapping[str, Any],
    placeholders: Mapping[str, str],
    leave_open: bool,
    limits: tuple[int, float],
) -> TemplateText:
    """Render messages in the form that the template reads; if it fails or leaves out a text, in the other forms."""
    failure, param = "", "messages"
    for content_form in _FORMS[sandbox.reads.content]:
        try:
            converted = [
                {**message, **_content(message, number, content_form, placeholders)} for number, message in enumerate(messages)
            ]
            end = secrets.token_hex(16) + " "
            last = _leave_open(converted, end) if leave_open else ""
            text = sandbox.render({**context, "messages": converted}, *limits)
            if leave_open:
                text = _up_to(text, last, end)
            _check_texts(messages, text)
            _check_calls(messages, text)
            return text
        except _FormError as error:
            param = param if failure else error.place
            failure = failure or str(error)
        except InputError:
            raise
        except TemplateError as error:
            failure = failure or f"the chat template refuses the messages: {clip(str(error), 200)}"
        except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            failure = failure or f"the chat template cannot take these messages: {clip(str(error), 200)}"
    raise InputError(failure, param=param)


def _content(message: Mapping[str, Any], number: int, content_format: str, placeholders: Mapping[str, str]) -> dict[str, Any]:
    """Return a message's content in a form of `_FORMS`, under its key; empty for a message without content."""
    content = message.get("content")
    if isinstance(content, str) and content_format == "parts":
        return {"content": _Parts([{"type": TemplateText.written("text"), "text": content}])}
    if not isinstance(content, list):
        return {}
    media = [part["type"] for part in content if part["type"] != "text"]
    if content_format in ("any", "parts") or (content_format == "text" and media):
        return {"content": _Parts(map(dict, content))}
    for modality in media:
        if modality not in placeholders:
            reason = f"message {number}: the chat template reads texts only, so it has no place for an item"
            raise _FormError(f"{reason} ({modality}); <<change_template>>", f"messages[{number}]")
    texts = [part.get("text") or TemplateText.written(placeholders.get(part["type"], "")) for part in content]
    return {"content": TemplateText("\n").join(texts)}


def _check_texts(messages: Iterable[Mapping[str, Any]], prompt: TemplateText) -> None:
    """Refuse a prompt that lacks the text of a message.

    Templates may change spaces, leave out thoughts, tags and switches such as /no_think, and write texts as JSON. The check
    ends early if many pieces are not where they are expected, as each is then searched for in the whole prompt.
    """
    whole, start, left = one_line(str.__str__(prompt)), 0, _MAX_SEARCHES
    for number, message in enumerate(messages):
        for text in texts(message):
            if message["role"] == "assistant":
                text = text.rpartition("</think>")[2]
            for piece in map(str.strip, _CHANGED.split(text)):
                start = whole.find(one_line(piece), start)
                if start < 0:
                    left -= 1
                    if left < 0:
                        return
                    forms = piece, json.dumps(piece, ensure_ascii=False)[1:-1]
                    start = next((position for position in map(whole.find, map(one_line, forms)) if position >= 0), -1)
                if start < 0:
                    reason = f"message {number}: the chat template leaves out or changes its text"
                    how = "leave that text out, or <<change_template>>"
                    raise _FormError(f"{reason}; {how}", f"messages[{number}]")


def _check_calls(messages: Iterable[Mapping[str, Any]], prompt: TemplateText) -> None:
    """Refuse a prompt that lacks a tool call of a message."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in prompt:
                reason = f"message {number}: the chat template leaves out its call of {short_repr(name, 40)}"
                raise _FormError(f"{reason}; leave the call out, or <<change_template>>", f"messages[{number}]")


def texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message's content."""
    content = message.get("content", "")
    for part in [{"text": content}] if isinstance(content, str) else content:
        if "text" in part:
            yield str.__str__(part["text"])
