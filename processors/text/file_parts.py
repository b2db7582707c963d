"""Parts of messages that hold a file of any kind: OpenAI's `file` and `input_file`, Anthropic's `document` and `source`."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any

from ...callers.errors import InputError, hint, short_repr, typed
from ...mm.media.data_url import is_data_url, split_data_url
from ...mm.media.pdf import MessagePdfs

FILE_TYPES = ("file", "input_file", "document")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "file": ("file_data", "file_url", "filename", "detail"),
    "source": ("type", "media_type", "data", "url"),
}
_TIFF = "image/tiff"
_PAGED = (_TIFF, "image/gif", "image/png", "image/apng", "image/webp", "image/avif", "image/heic", "image/heif")
_IGNORED = ("type", "cache_control", "prompt_cache_breakpoint", "title", "context", "citations")
_SOURCES = {"base64": "data", "url": "url"}  # type of a source -> the key that holds it


def as_media_parts(part: Mapping[str, Any], where: str, pdfs: MessagePdfs) -> list[Mapping[str, Any]]:
    """Convert a part of FILE_TYPES to an image, video or audio part, by its media type or file name.

    A PDF, and a TIFF or an animation that is sent as data, becomes its pages.

    Raises:
        InputError: the file is not an image, video, audio or PDF, or the part has a wrong form.
    """
    kind = part["type"]
    key = "source" if kind == "document" else "file"
    values = {name: value for name, value in part.items() if value is not None and name not in _IGNORED}
    inner = values if kind == "input_file" else values.pop(key, None)
    if kind != "input_file" and values:
        name = next(iter(values))
        raise InputError(f"{where}: unknown field {short_repr(name, 40)}; {hint(name, [key])}", code="unknown_name", value=name)
    url: object
    detail: object = None
    if kind == "document":
        url, name = read_source(inner, key, where), _text_of(part, "title")
    else:
        fields = _checked(inner, key, where)
        url, name = fields.get("file_data", fields.get("file_url")), _text_of(fields, "filename")
        detail = fields.get("detail")
    if not isinstance(url, str):
        raise InputError(f"{where}: {key} needs file_data, a data: URL of the file, not {typed(url)}")
    if not is_data_url(url) and "://" not in url[:16]:
        url = f"data:;base64,{url}"
    data = split_data_url(url)
    media_type = (data and data.media_type) or (mimetypes.guess_type(name)[0] or "").lower()
    if media_type == "application/pdf":
        parts = _pages(url, where, pdfs)
    else:
        part = {"type": _modality(media_type, name, where), "url": url}
        parts = pages_of_image(part, url, where, pdfs) if media_type in _PAGED and is_data_url(url) else [part]
    return [{**media_part, "detail": detail} if media_part["type"] == "image" else media_part for media_part in parts]


def tiff_url(part: Mapping[str, Any]) -> str | None:
    """Return the data: URL of a TIFF in an image part, which may have several pages; None for other parts."""
    value = part.get("image_url", part.get("image"))
    url = value.get("url") if type(value) is dict else value
    if type(url) is not str or part.get("uuid") is not None:
        return None
    data = split_data_url(url)
    return url if data is not None and data.media_type == _TIFF else None


def pages_of_image(part: Mapping[str, Any], url: str, where: str, pdfs: MessagePdfs) -> list[Mapping[str, Any]]:
    """Return an image part with a data: URL as one part for each page, or alone if the image has one page."""
    pages = _pages(url, where, pdfs)
    value = part.get("image_url")
    options = {name: option for name, option in part.items() if name not in ("type", "url", "image", "image_url")}
    if isinstance(value, Mapping) and value.get("detail") is not None:
        options.setdefault("detail", value["detail"])
    return [{**options, **page} for page in pages] if len(pages) > 1 else [part]


def _pages(url: str, where: str, pdfs: MessagePdfs) -> list[Mapping[str, Any]]:
    if not is_data_url(url):
        raise InputError(f"{where}: a PDF is taken as data only; download it and write data:application/pdf;base64,<data>")
    try:
        pages = pdfs.pages(url)
    except InputError as error:
        raise InputError(f"{where}: {error.info.text}", code=error.info.code, param=error.info.param) from None
    return [{"type": "image", "image": page} for page in pages]


def read_source(value: object, key: str, where: str) -> str:
    """Return the URL of an Anthropic source: `{"type": "base64", "media_type", "data"}` or `{"type": "url", "url"}`."""
    fields = _checked(value, key, where)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _SOURCES:
        sources = " or ".join(_SOURCES)
        raise InputError(f"{where}: the type of {key} must be {sources}, not {short_repr(kind, 40)}; send the file itself")
    source = fields.get(_SOURCES[kind])
    if not isinstance(source, str):
        raise InputError(f"{where}: {_SOURCES[kind]} of {key} must be a string, not {typed(source)}")
    is_url = kind == "url" or is_data_url(source)
    return source if is_url else f"data:{_text_of(fields, 'media_type')};base64,{source}"


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
            reason = f"{where}: {key}: unknown field {short_repr(name, 40)}; {hint(name, _KEYS[key])}"
            raise InputError(reason, code="unknown_name", value=name)
    return {name: entry for name, entry in value.items() if entry is not None}


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
