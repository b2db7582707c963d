"""Content parts of chat messages: the media in order, and the parts that templates see in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...mm.errors import InputError, hint, short_repr, typed
from ...mm.media.policy import MediaUrl
from ...mm.types import Media

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
_MODALITIES = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
PART_TYPES = ("text", *_MODALITIES)
_FIELDS = {"image_url": ("url", "detail"), "video_url": ("url",), "audio_url": ("url",), "input_audio": ("data", "format")}
_PIXELS = ("min_pixels", "max_pixels", "detail")
_OPTIONS = {"image": _PIXELS, "video": (*_PIXELS, "fps", "num_frames"), "audio": ()}


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[str, Media]]]:
    """Return the messages as templates take them, and the media as `(modality, Media)`, both in order.

    Every form of image part becomes `{"type": "image", "image": True}`, so that templates find the type and the key that
    they check, without data. A URL or path becomes a `MediaUrl`; other objects are kept. Fields that are None are left out.

    Raises:
        InputError: a message or part has a wrong form; the error has its number.
    """
    media: list[tuple[str, Media]] = []
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            given = f"role {short_repr(message.get('role'), 40)}" if isinstance(message, Mapping) else typed(message)
            how = f"give an object with content and a role, one of {', '.join(ROLES)}"
            raise InputError(f"message {number}: {how}, not {given}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_part(part, f"message {number} part {i}", media) for i, part in enumerate(content)]
        elif not (content is None or isinstance(content, str)):
            raise InputError(f"message {number}: content must be text or a list of parts, not {typed(content)}")
        plain.append({key: value for key, value in {**message, "content": content}.items() if value is not None})
    return plain, media


def _part(part: object, where: str, media: list[tuple[str, Media]]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in PART_TYPES:
        kind = part.get("type") if isinstance(part, Mapping) else part
        reason = "a part needs a type" if kind is None else f"unknown part type {str(kind)[:40]!r}"
        raise InputError(f"{where}: {reason}; {hint(kind, PART_TYPES)}")
    kind = str(part["type"])
    modality = _MODALITIES.get(kind, "")
    options = _OPTIONS.get(modality, ())
    _check_keys(part, ("type", kind, *(("uuid", *options) if modality else ())), f"{where}: ")
    if kind not in part:
        raise InputError(f"{where}: a part of type {kind} needs a field {kind!r}")
    if kind == "text":
        if not isinstance(part["text"], str):
            raise InputError(f"{where}: text must be a string, not {typed(part['text'])}")
        return {"type": "text", "text": part["text"]}
    media.append((modality, _media(part, kind, options, where)))
    return {"type": modality, modality: True}


def _media(part: Mapping[str, Any], kind: str, options: Sequence[str], where: str) -> Media:
    value, uuid = part[kind], part.get("uuid")
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise InputError(f"{where}: uuid is {str(uuid)[:40]!r}; give a non-empty string")
    if value is None and uuid is None:
        raise InputError(f"{where}: {kind} is missing; give its data, or the uuid of an earlier item")
    given = {name: part.get(name) for name in options}
    if value is not None and kind in _FIELDS:
        _check_object(value, kind, where)
        if given.get("detail") is None and "detail" in value:
            given["detail"] = value["detail"]
        value = _address(value, kind, where)
    elif value is not None:
        value = _object(value, kind, where)
    given = {name: _checked(name, option, where) for name, option in given.items() if option is not None}
    if "fps" in given and "num_frames" in given:
        raise InputError(f"{where}: fps and num_frames exclude each other; give one of them")
    return Media(value, uuid, **given)


def _check_object(value: object, kind: str, where: str) -> None:
    form = '{"data": "<base64>", "format": "wav"}' if kind == "input_audio" else '{"url": "data:..."}'
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {kind} is an object {form}, not {typed(value)}")
    if "uuid" in value:
        raise InputError(f"{where}: give uuid beside {kind}, not inside it")
    _check_keys(value, _FIELDS[kind], f"{where}: {kind}: ")
    name = _FIELDS[kind][0]
    if not isinstance(value.get(name), str):
        raise InputError(f"{where}: {kind} is an object {form}; its {name!r} is {typed(value.get(name))}")


def _address(value: Mapping[str, Any], kind: str, where: str) -> MediaUrl:
    if kind != "input_audio":
        return MediaUrl(value["url"])
    form = value.get("format")
    if not (isinstance(form, str) and form.isascii() and form.isalnum()):
        raise InputError(f"{where}: input_audio needs a format such as 'wav' or 'mp3', not {str(form)[:40]!r}")
    return MediaUrl(f"data:audio/{form};base64,{value['data']}")


def _object(value: object, kind: str, where: str) -> object:
    """Return an object of the caller's own code. Text is a URL; text inside a list or mapping is refused."""
    if isinstance(value, str):
        return MediaUrl(value)
    if isinstance(value, Media):
        raise InputError(f"{where}: {kind} must be plain data; put uuid and options on the part")
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple) and any(isinstance(entry, str) for entry in inside):  # type: ignore[attr-defined]
        raise InputError(f'{where}: {kind} contains text; give a URL alone, or in a part {{"type": "{kind}_url"}}')
    return value


def _checked(name: str, value: object, where: str) -> Any:
    expected, holds = _CHECKS[name]
    if not holds(value):
        raise InputError(f"{where}: {name} is {str(value)[:40]!r}; give {expected}", param=name)
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "min_pixels": ("a positive integer", _is_whole),
    "max_pixels": ("a positive integer", _is_whole),
    "num_frames": ("a positive integer, or -1 for all frames", lambda value: _is_whole(value) or value == -1),
    "fps": ("a positive number", _is_number),
    "detail": ("low, high or auto", lambda value: value in ("low", "high", "auto")),
}


def _check_keys(given: Mapping[Any, object], known: Collection[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"{where}unknown field {str(key)[:40]!r}; {hint(key, known)}")
