"""Content parts of chat messages: the media in order, and the parts that templates see in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ...callers.errors import InputError, hint, naming_param, short_repr, typed
from ...mm.media.data_url import is_data_url
from ...mm.media.pdf import MessagePdfs
from ...mm.media.policy import DEFAULT_POLICY, FrameFiles, MediaPolicy, MediaUrl
from ...mm.parse import plain_data
from ...mm.types import Media
from ..options import SOUND_KWARGS
from .file_parts import FILE_TYPES, as_media_parts, pages_of_image, read_source, tiff_url

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
PART_TYPES = {
    "text": "text",  # OpenAI
    "refusal": "text",
    "input_text": "text",  # OpenAI's Responses
    "output_text": "text",
    "thinking": "text",  # vLLM
    "image": "image",  # transformers, qwen-vl-utils
    "image_url": "image",  # OpenAI
    "input_image": "image",  # OpenAI's Responses
    "image_pil": "image",  # vLLM
    "image_embeds": "image",
    "video": "video",  # transformers, qwen-vl-utils
    "video_url": "video",  # vLLM
    "video_embeds": "video",
    "audio": "audio",  # transformers
    "audio_url": "audio",  # vLLM
    "audio_embeds": "audio",
    "input_audio": "audio",  # OpenAI
}
"""Type of a part -> "text", or the modality of its item."""
_IGNORED = (
    "cache_control",  # Anthropic; every prefix is cached here
    "annotations",  # OpenAI's Responses, on output_text
    "logprobs",
    "prompt_cache_breakpoint",
    "closed",  # vLLM, on thinking
    "signature",  # Anthropic, on thinking
)
_DETAILS = ("low", "high", "auto", "original")
_PIXELS = ("min_pixels", "max_pixels", "detail", "resized_height", "resized_width")
_SECONDS = ("video_start", "video_end")
_FRAMES = ("fps", "num_frames", "nframes", "min_frames", "max_frames", "total_pixels", "sample_fps", "frame_types", *_SECONDS)
_OPTIONS = {"text": (), "image": _PIXELS, "video": (*_PIXELS, *_FRAMES, *SOUND_KWARGS), "audio": SOUND_KWARGS}
_FILES_FPS = 2.0  # rate of frames in files, as in qwen-vl-utils
_MAX_FILES = 4096  # frames of one video


def holds_files(messages: object) -> bool:
    """Return whether a conversation of plain lists and dicts has a part that holds a file or a TIFF, which may have pages.

    The messages are not checked yet: methods of other classes, which may raise, are not called.
    """
    contents = (message.get("content") for message in _plain_list(messages) if type(message) is dict)
    parts = (part for content in contents for part in _plain_list(content))
    plain = [part for part in parts if type(part) is dict]
    kinds = (part.get("type") for part in plain)
    return any(type(kind) is str and kind in FILE_TYPES for kind in kinds) or any(map(tiff_url, plain))


def _plain_list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) and type(value) in (list, tuple) else ()


def split_media(
    messages: Sequence[Mapping[str, Any]],
    policy: MediaPolicy = DEFAULT_POLICY,
    tenant: str | None = None,
) -> tuple[list[dict[str, Any]], list[tuple[str, Media]], list[str]]:
    """Return the messages as templates take them, the media as `(modality, Media)`, and the place of each medium.

    Every form of image part becomes `{"type": "image", "image": True}`, so that templates find the type and the key that
    they check, without data. A URL or path becomes a `MediaUrl`, a PDF in a file part its pages; other objects are kept. Fields
    that are None are left out.

    Args:
        policy: limits of PDFs, which are opened here to count their pages. They apply to all PDFs together.
        tenant: workers that have read another one's PDF are not used.

    Returns:
        Messages and media in order. A place is the part that holds the medium, such as "messages[0].content[1]"; the pages of a
        PDF share theirs.

    Raises:
        InputError: a message or part has a wrong form; the error has its number, and its `param` is the place.
    """
    media: list[tuple[str, Media]] = []
    places: list[str] = []
    plain = []
    pdfs = MessagePdfs(policy, tenant)
    for number, message in enumerate(messages):
        param = f"messages[{number}]"
        with naming_param(param):
            content = _checked_content(message, number)
        if isinstance(content, list | tuple):
            parts, content = content, list[Any]()
            for i, part in enumerate(parts):
                where = f"message {number} part {i}"
                with naming_param(f"{param}.content[{i}]", _PART_FIELDS):
                    content += [_part(unpacked, where, media) for unpacked in _unpacked(part, where, pdfs)]
                places += [f"{param}.content[{i}]"] * (len(media) - len(places))
        plain.append({key: value for key, value in {**message, "content": content}.items() if value is not None})
    return plain, media, places


def _checked_content(message: object, number: int) -> object:
    """Return the content of a message: a text, a list of parts, or None if other fields have a value."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str) or role not in ROLES:
        actual = f"role {short_repr(role, 40)}" if isinstance(message, Mapping) else typed(message)
        how = f"give an object with content and a role, one of {', '.join(ROLES)}"
        prompts = "; a list of prompts goes to LLM.generate" if isinstance(message, str) else ""
        raise InputError(f"message {number}: {how}, not {actual}{prompts}")
    content: object = message.get("content")
    if not (content is None or isinstance(content, str | list | tuple)):
        raise InputError(f"message {number}: content must be text or a list of parts, not {typed(content)}")
    if content is None and not any(value is not None for key, value in message.items() if key not in ("role", "name")):
        raise InputError(f"message {number}: content is missing; give a text or a list of parts")
    if content == []:
        raise InputError(f"message {number}: content is an empty list; give a text or at least one part")
    return content


def _unpacked(part: object, where: str, pdfs: MessagePdfs) -> Sequence[object]:
    """Return the media parts of a file part or a TIFF, or the part itself."""
    if isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in FILE_TYPES:
        return as_media_parts(part, where, pdfs)
    if isinstance(part, Mapping) and (url := tiff_url(part)) is not None:
        return pages_of_image(part, url, where, pdfs)
    return [part]


def _part(part: object, where: str, media: list[tuple[str, Media]]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        how = 'put the item into an object such as {"type": "image", "image": item}'
        raise InputError(f"{where}: a part must be an object or a string, not {typed(part)}; {how}")
    modality = _modality(part, where)
    keys, options = _KEYS[modality], _OPTIONS[modality]
    uuid = () if modality == "text" else ("uuid",)
    part = {key: value for key, value in part.items() if value is not None or not _is_known(key)}
    _check_keys({key: None for key in part if key not in _IGNORED}, ("type", *keys, *uuid, *options), f"{where}: ")
    present = [key for key in keys if key in part]
    if len(present) > 1:
        raise InputError(f"{where}: {' and '.join(present)} both hold the {modality}; give one of them, or two parts")
    if modality == "text":
        text = part[present[0]] if present else None
        if not isinstance(text, str):
            raise InputError(f"{where}: {present[0] if present else 'text'} must be a string, not {typed(text)}")
        return {"type": "text", "text": text}
    media.append((modality, _media(part, present[0] if present else "", modality, where)))
    return {"type": modality, modality: True}


def _modality(part: Mapping[str, Any], where: str) -> str:
    """Return "text" or the modality of a part. A part without a type is recognised by its keys."""
    kind = part.get("type")
    if kind is None:
        present = [key for key in PART_TYPES if part.get(key) is not None]
        kinds = {PART_TYPES[key] for key in present}
        if len(kinds) == 1:
            return kinds.pop()
        reason = f"a part with {' and '.join(present)} needs a type; or give two parts" if present else "a part needs a type"
        raise InputError(f"{where}: {reason}; {hint(kind, (*PART_TYPES, *FILE_TYPES))}", code="unknown_name", value=kind)
    if not isinstance(kind, str) or kind not in PART_TYPES:
        raise InputError(
            f"{where}: unknown part type {short_repr(kind, 40)}; {hint(kind, (*PART_TYPES, *FILE_TYPES))}",
            code="unknown_name",
            value=kind,
        )
    return PART_TYPES[kind]


def _is_known(key: object) -> bool:
    """Return whether a part of any type may have this key: rows of a data set have all keys, most with None."""
    return key == "uuid" or any(key in keys for keys in (*_KEYS.values(), *_OPTIONS.values()))


def _media(part: Mapping[str, Any], key: str, modality: str, where: str) -> Media:
    value, uuid, read = part.get(key), part.get("uuid"), _KEYS[modality].get(key)
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise InputError(f"{where}: uuid is {short_repr(uuid, 40)}; give a non-empty string")
    if value is None and uuid is None:
        raise InputError(f"{where}: {part.get('type', modality)} is missing; give its data, or the uuid of an earlier item")
    options = {name: part[name] for name in _OPTIONS[modality] if name in part}
    if read is _read_url and isinstance(value, Mapping) and value.get("detail") is not None:
        options.setdefault("detail", value["detail"])
    if read is not None and value is not None:
        value = read(value, key, where)
    options = {name: _checked(name, option, where) for name, option in options.items()}
    if "nframes" in options and "num_frames" not in options:
        options["num_frames"] = options.pop("nframes")
    for name in ("fps", "nframes"):
        if name in options and "num_frames" in options:
            raise InputError(f"{where}: {name} and num_frames exclude each other; give one of them")
    return Media(_with_rate(value, options, where) if modality == "video" else value, uuid, **options)


def _with_rate(value: object, options: dict[str, Any], where: str) -> object:
    """Return the frames of a video with their rate, which is taken from the options. Other videos are returned as they are."""
    if isinstance(value, list) and any(isinstance(frame, MediaUrl | PurePath) for frame in value):
        return FrameFiles(tuple(value), float(options.pop("sample_fps", options.pop("fps", _FILES_FPS))))
    if "sample_fps" not in options:
        return value
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}: sample_fps is the rate of a list of frames; for a file, give fps", param="sample_fps")
    return value, {"fps": options.pop("sample_fps"), "do_sample_frames": False}


def _read_url(value: object, key: str, where: str) -> MediaUrl:
    if isinstance(value, Mapping) and "uuid" in value:
        raise InputError(f"{where}: give uuid beside {key}, not inside it")
    if isinstance(value, Mapping):
        _check_keys(value, ("url", "detail"), f"{where}: {key}: ")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        what = f"its 'url' is {typed(url)}" if isinstance(value, Mapping) else f"not {typed(value)}"
        raise InputError(f'{where}: {key} must be a URL or an object {{"url": "data:..."}}; {what}')
    return MediaUrl(url)


def _read_source(value: object, key: str, where: str) -> MediaUrl:
    return MediaUrl(read_source(value, key, where))


def _read_base64(value: object, key: str, where: str) -> MediaUrl:
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} must be base64 text, not {typed(value)}")
    return MediaUrl(value if is_data_url(value) else f"data:;base64,{value}")


def _read_file(value: object, key: str, where: str) -> MediaUrl:
    if not isinstance(value, Mapping):
        raise InputError(f'{where}: {key} must be an object {{"data": "<base64>", "format": "wav"}}, not {typed(value)}')
    _check_keys(value, ("data", "format"), f"{where}: {key}: ")
    data, audio_format = value.get("data"), value.get("format")
    if not isinstance(data, str):
        raise InputError(f"{where}: 'data' of {key} must be base64 text, not {typed(data)}")
    if not (isinstance(audio_format, str) and audio_format.isascii() and audio_format.isalnum()):
        raise InputError(f"{where}: {key} needs a format such as 'wav' or 'mp3', not {short_repr(audio_format, 40)}")
    return MediaUrl(data if is_data_url(data) else f"data:audio/{audio_format};base64,{data}")


def _read_embeds(value: object, key: str, where: str) -> object:
    entries = value.values() if isinstance(value, Mapping) else [value]
    if any(isinstance(entry, str | bytes) for entry in entries):
        raise InputError(
            f"{where}: {key} must be a tensor of encoder rows; a serialised tensor is never unpickled, load it first"
        )
    return value


def _read_object(value: object, key: str, where: str) -> object:
    """Return an object of the caller's own code. Text is a URL or path; a list of texts is the frames of a video."""
    try:
        value = plain_data(value)
    except InputError as error:
        raise InputError(f"{where}: {error.info.text}", param=key) from None
    if isinstance(value, str):
        return MediaUrl(value)
    if isinstance(value, Media):
        raise InputError(f"{where}: {key} must be plain data; put uuid and options on the part")
    inside = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inside, list | tuple) or not any(isinstance(entry, str | PurePath) for entry in inside):
        return value
    is_frames = key == "video" and value is inside and all(isinstance(frame, str | PurePath) for frame in inside)
    if not is_frames:
        raise InputError(f'{where}: {key} contains text; give a URL alone, or in a part {{"type": "{key}_url"}}')
    if len(inside) > _MAX_FILES:
        raise InputError(f"{where}: {key} has {len(inside):,} files, the limit is {_MAX_FILES:,}; give fewer, or a video file")
    return [MediaUrl(frame) if isinstance(frame, str) else frame for frame in inside]


_KEYS: Mapping[str, Mapping[str, Callable[[object, str, str], object] | None]] = {
    "text": {"text": None, "refusal": None, "thinking": None},
    "image": {
        "image": _read_object,
        "image_pil": _read_object,
        "image_url": _read_url,
        "image_embeds": _read_embeds,
        "url": _read_url,  # transformers, as path and base64
        "path": _read_object,
        "base64": _read_base64,
        "source": _read_source,  # Anthropic
    },
    "video": {
        "video": _read_object,
        "video_url": _read_url,
        "video_embeds": _read_embeds,
        "url": _read_url,
        "path": _read_object,
    },
    "audio": {
        "audio": _read_object,
        "audio_url": _read_url,
        "audio_embeds": _read_embeds,
        "input_audio": _read_file,
        "url": _read_url,
        "path": _read_object,
    },
}
"""Keys that may hold the text or the item of a part, and the functions that read the item."""


_PART_FIELDS = frozenset(name for fields in (*_KEYS.values(), *_OPTIONS.values()) for name in fields)


def _checked(name: str, value: object, where: str) -> Any:
    expected, holds = _CHECKS[name]
    if not holds(value):
        raise InputError(f"{where}: {name} is {short_repr(value, 40)}; give {expected}", param=name)
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_count(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, int) and value == -1)


def _are_bits(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(bit) is int and bit in (0, 1) for bit in value)


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "min_pixels": ("a positive integer", _is_whole),
    "max_pixels": ("a positive integer", _is_whole),
    "resized_height": ("a positive integer", _is_whole),
    "resized_width": ("a positive integer", _is_whole),
    "total_pixels": ("a positive integer", _is_whole),
    "min_frames": ("a positive integer", _is_whole),
    "max_frames": ("a positive integer", _is_whole),
    "num_frames": ("a positive integer, or -1 for all frames", _is_count),
    "nframes": ("a positive integer, or -1 for all frames", _is_count),
    "fps": ("a positive number", _is_number),
    "sample_fps": ("a positive number", _is_number),
    "video_start": ("seconds, 0 or above", lambda value: _is_number(value) or (value == 0 and not isinstance(value, bool))),
    "video_end": ("a positive number of seconds", _is_number),
    "frame_types": ("a list of 0 (slow) and 1 (fast)", _are_bits),
    "detail": ("low, high, auto or original", lambda value: isinstance(value, str) and value in _DETAILS),
}


def _check_keys(keys: Mapping[Any, object], names: Collection[str], where: str) -> None:
    for key in keys:
        if key not in names:
            raise InputError(f"{where}unknown field {short_repr(key, 40)}; {hint(key, names)}", code="unknown_name", value=key)
