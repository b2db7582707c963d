"""Parts of messages that hold a file of any kind: OpenAI's `file` and `input_file`, Anthropic's `document` and `source`."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any

from ...mm.errors import InputError, hint, short_repr, typed
from ...mm.media.pdf import MessagePdfs

FILE_TYPES = ("file", "input_file", "document")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "file": ("file_data", "file_url", "filename"),
    "source": ("type", "media_type", "data", "url"),
}
_IGNORED = ("type", "cache_control", "title", "context", "citations")
_SOURCES = {"base64": "data", "url": "url"}  # type of a source -> the key that holds it


def as_media_parts(part: Mapping[str, Any], where: str, pdfs: MessagePdfs) -> list[Mapping[str, Any]]:
    """Convert a part of FILE_TYPES to an image, video or audio part, by its media type or file name; a PDF to its pages.

    Raises:
        InputError: the file is not an image, video, audio or PDF, or the part has a wrong form.
    """
    kind = part["type"]
    key = "source" if kind == "document" else "file"
    given = {name: value for name, value in part.items() if value is not None and name not in _IGNORED}
    inner = given if kind == "input_file" else given.pop(key, None)
    if kind != "input_file" and given:
        name = next(iter(given))
        raise InputError(f"{where}: unknown field {short_repr(name, 40)}; {hint(name, [key])}")
    url: object
    if kind == "document":
        url, name = read_source(inner, key, where), _text_of(part, "title")
    else:
        fields = _checked(inner, key, where)
        url, name = fields.get("file_data", fields.get("file_url")), _text_of(fields, "filename")
    if not isinstance(url, str):
        raise InputError(f"{where}: {key} needs file_data, a data: URL of the file, not {typed(url)}")
    if url[:5].lower() != "data:" and "://" not in url[:16]:
        url = f"data:;base64,{url}"
    media_type = url[5:1024].split(",")[0].split(";")[0] if url[:5].lower() == "data:" else ""
    media_type = media_type or mimetypes.guess_type(name)[0] or ""
    if media_type.lower() == "application/pdf":
        return _pages(url, where, pdfs)
    return [{"type": _modality(media_type.lower(), name, where), "url": url}]


def _pages(url: str, where: str, pdfs: MessagePdfs) -> list[Mapping[str, Any]]:
    if url[:5].lower() != "data:":
        raise InputError(f"{where}: a PDF is taken as data only; download it and write data:application/pdf;base64,<data>")
    try:
        pages = pdfs.pages(url)
    except InputError as error:
        raise InputError(f"{where}: {error}", param=error.info.param) from None
    return [{"type": "image", "image": page} for page in pages]


def read_source(value: object, key: str, where: str) -> str:
    """Return the URL of an Anthropic source: `{"type": "base64", "media_type", "data"}` or `{"type": "url", "url"}`."""
    fields = _checked(value, key, where)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _SOURCES:
        known = " or ".join(_SOURCES)
        raise InputError(f"{where}: the type of {key} must be {known}, not {short_repr(kind, 40)}; send the file itself")
    found = fields.get(_SOURCES[kind])
    if not isinstance(found, str):
        raise InputError(f"{where}: {_SOURCES[kind]} of {key} must be a string, not {typed(found)}")
    is_url = kind == "url" or found[:5].lower() == "data:"
    return found if is_url else f"data:{_text_of(fields, 'media_type')};base64,{found}"


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return an optional text; "" if it has another type."""
    text = fields.get(name)
    return text if isinstance(text, str) else ""


def _checked(value: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key} must be an object with {', '.join(_KEYS[key])}, not {typed(value)}")
    if value.get("file_id") is not None:
        raise InputError(f"{where}: file_id names a file on OpenAI's servers; give file_data, a data: URL of the file")
    for name in value:
        if name not in (*_KEYS[key], "file_id"):
            raise InputError(f"{where}: {key}: unknown field {short_repr(name, 40)}; {hint(name, _KEYS[key])}")
    return {name: one for name, one in value.items() if one is not None}


def _modality(media_type: str, name: str, where: str) -> str:
    modality = media_type.partition("/")[0]
    if modality in ("image", "video", "audio"):
        return modality
    what = f"the file {short_repr(name)}" if name else "the file"
    if modality == "text":
        raise InputError(f"{where}: {what} is a text ({media_type}); give it in a part of type text")
    if media_type:
        raise InputError(f"{where}: {what} is {media_type[:80]}; models take images, videos, audio, PDFs and text")
    raise InputError(f"{where}: {what} has no media type; write data:image/png;base64,<data>, or give a filename")
