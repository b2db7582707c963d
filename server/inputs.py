"""Inputs of embeddings and scores as the pipelines take them. Strings of media become URLs that the media policy checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.errors import InputError, short_repr
from ..callers.message_fields import check_fields
from ..mm.media.policy import MediaUrl

MAX_INPUTS = 2048
_MEDIA = ("image", "video", "audio")
_FORM = "give a text, token ids, an object with text, image, video or audio, or an object with content, a list of parts"


def read_inputs(value: object, param: str) -> list[Any]:
    """Return one input or a list of them as a list.

    Raises:
        InputError: an input has another form, or there are too many.
    """
    is_token_ids = isinstance(value, list) and bool(value) and all(isinstance(token, int) for token in value)
    several = isinstance(value, list) and not is_token_ids
    listed: list[Any] = value if isinstance(value, list) and not is_token_ids else [value]
    if not 1 <= len(listed) <= MAX_INPUTS:
        raise InputError(f"<<param>> has {len(listed)} entries; give from 1 to {MAX_INPUTS}", param=param)
    return [read_input(entry, f"{param}[{index}]" if several else param) for index, entry in enumerate(listed)]


def read_input(value: object, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        return {"prompt_token_ids": value}
    if not isinstance(value, Mapping):
        raise _error(where, value)
    parts: Mapping[str, Any] = value
    if "content" in value:
        check_fields(value, ("content",), where, where)
        parts = _of_parts(value["content"], where)
    for name in parts:
        if name not in ("text", *_MEDIA):
            raise InputError(f"<<param>> has the key {short_repr(name, 40)}; {_FORM}", param=where)
    return {name: content if name == "text" else _urls(content, where) for name, content in parts.items()}


def _of_parts(parts: object, where: str) -> dict[str, list[Any]]:
    """Return content parts of a message as lists of texts and media."""
    by_kind: dict[str, list[Any]] = {}
    if isinstance(parts, str):
        return {"text": [parts]}
    listed: list[Any] = parts if isinstance(parts, list) else [parts]
    for part in listed:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in part or kind.removesuffix("_url") not in ("text", *_MEDIA):
            raise _error(where, part)
        check_fields(part, ("type", kind), f"a part of {where}", where)
        by_kind.setdefault(kind.removesuffix("_url"), []).append(part[kind])
    return by_kind


def _urls(value: object, where: str) -> Any:
    if isinstance(value, list):
        return [_urls(item, where) for item in value]
    if isinstance(value, Mapping):
        check_fields(value, ("url",), f"a medium of {where}", where)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise _error(where, value)
    return MediaUrl(url)


def _error(where: str, value: object) -> InputError:
    return InputError(f"<<param>> is {short_repr(value)}; {_FORM}", param=where)
