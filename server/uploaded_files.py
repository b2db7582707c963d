"""Uploaded files in requests: parts that name one by its `file_id` get its bytes, as if the client had sent them."""

from __future__ import annotations

import asyncio
import mimetypes
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ..callers.errors import InputError, check_utf8
from .errors import HttpError
from .guard import HELD_BYTES, PRIORITY, TENANT
from .state import services_of
from .store import Store

PURPOSES = ("user_data", "vision")
"""Purposes of files that messages may name."""
_Part = Mapping[str, Any]


@dataclass(frozen=True)
class _File:
    name: str
    media_type: str
    data: str  # base64

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


@dataclass(frozen=True)
class StoredFile:
    """An uploaded file. `where`: the field of the request that names it."""

    id: str
    where: str
    name: str
    size: int


async def with_files(request: Request, messages: Sequence[Any], field: str) -> list[Any]:
    """Return messages whose parts with a `file_id` have the file itself. Without a store, they are as before.

    Args:
        messages: those of any of the APIs, or the items of /v1/responses.
        field: their name in the body.

    Raises:
        HttpError: the key has no such file, or the files are larger than a body may be.
        InputError: a file has another purpose.
    """
    server = services_of(request)
    if server.store is None:
        return [*messages]
    parts = [pair for index, message in enumerate(messages) for pair in _parts(message, f"{field}[{index}]")]
    places = {file: where for where, part in reversed(parts) if (file := _file_id(part)) is not None}
    stored = await open_files(request, server.store, {file: places[file] for file in reversed(places)})
    loaded = {stored_file.id: await _load(server.store, stored_file) for stored_file in stored}
    return [_filled(message, loaded) for message in messages] if loaded else [*messages]


def _parts(message: Any, where: str) -> list[tuple[str, _Part]]:
    """Return the parts of a message, those in results of tools, and where they are."""
    located: list[tuple[str, _Part]] = []
    for key in ("content", "output") if isinstance(message, Mapping) else ():
        parts = message.get(key)
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, Mapping):
                path = f"{where}.{key}[{number}]"
                located += [(path, part), *(_parts(part, path) if part.get("type") == "tool_result" else ())]
    return located


def _file_id(part: _Part) -> str | None:
    """Return the id of the file that a part names."""
    key, _ = _FORMS.get(str(part.get("type")), (None, None))
    holder = part.get(key) if key else part
    file = holder.get("file_id") if isinstance(holder, Mapping) and part.get("type") in _FORMS else None
    return file if isinstance(file, str) else None


def _filled(message: Any, loaded: Mapping[str, _File]) -> Any:
    """Return a message whose parts have the files that they name."""
    if not isinstance(message, Mapping):
        return message
    result = dict(message)
    for key in ("content", "output"):
        parts = message.get(key)
        if isinstance(parts, list):
            result[key] = [_filled_part(part, loaded) if isinstance(part, Mapping) else part for part in parts]
    return result


def _filled_part(part: _Part, loaded: Mapping[str, _File]) -> _Part:
    if part.get("type") == "tool_result":
        filled: _Part = _filled(part, loaded)
        return filled
    file = _file_id(part)
    return part if file is None else _FORMS[part["type"]][1](part, loaded[file])


async def _load(store: Store, file: StoredFile) -> _File:
    blocks = await read_file(store, file)
    data = await asyncio.to_thread(lambda: b64encode(b"".join(blocks)).decode())
    is_pdf = bool(blocks) and blocks[0].startswith(b"%PDF-")
    return _File(file.name, "application/pdf" if is_pdf else mimetypes.guess_type(file.name)[0] or "", data)


async def open_files(request: Request, store: Store, places: Mapping[str, str]) -> list[StoredFile]:
    """Return uploaded files, whose bytes count as the request's until its end. A line of a batch waits for room for all.

    Args:
        places: id of a file -> the field that names it.

    Raises:
        HttpError: the key has no such file, or the files are too large.
        InputError: a file has another purpose.
    """
    server, owner = services_of(request), request.scope[TENANT] or ""
    left, files = server.config.max_body_bytes, list[StoredFile]()
    for file, where in places.items():
        check_utf8(file, where)
        record = await store.call(store.file, owner, file, where)
        if record["purpose"] not in PURPOSES:
            reason = f"the file {file!r} has the purpose {record['purpose']}; upload it with {' or '.join(PURPOSES)}"
            raise InputError(reason, code="invalid_value", param=where)
        left -= record["bytes"]
        if left < 0:
            reason = f"the files of this request have more than {server.config.max_body_bytes} bytes (max_body_bytes)"
            raise HttpError(413, f"{reason}; name fewer or smaller ones", "body_too_large", where)
        files.append(StoredFile(file, where, record["filename"], record["bytes"]))
    size = sum(file.size for file in files)
    if files and PRIORITY in request.scope:
        await server.batches.hold_files(request.scope, size)
    elif files:
        limit = server.config.max_total_body_bytes
        if server.body_bytes.count + size > limit:
            reason = f"the bodies and files of the requests in progress are larger than {limit} bytes"
            raise HttpError(429, f"{reason} (max_total_body_bytes); try again later", "overloaded")
        server.body_bytes.count += size
        request.scope[HELD_BYTES] += size
    return files


async def read_file(store: Store, file: StoredFile) -> list[bytes]:
    """Return an uploaded file as blocks of bytes. Raise HttpError if it was removed meanwhile."""
    blocks, after, missing = list[bytes](), -1, file.size
    while missing > 0:
        block, after = await store.call(store.content, file.id, after)
        if not block:
            raise HttpError(404, f"the file {file.id!r} was removed while it was read", "not_found", file.where)
        blocks.append(block)
        missing -= len(block)
    return blocks


def _file_part(part: _Part, file: _File) -> _Part:
    inner = {name: value for name, value in part["file"].items() if name != "file_id"}
    return {**part, "file": {"filename": file.name, **inner, "file_data": file.url}}


def _input_file(part: _Part, file: _File) -> _Part:
    inner = {name: value for name, value in part.items() if name != "file_id"}
    return {"filename": file.name, **inner, "file_data": file.url}


def _input_image(part: _Part, file: _File) -> _Part:
    return {**{name: value for name, value in part.items() if name != "file_id"}, "image_url": file.url}


def _block(part: _Part, file: _File) -> _Part:
    return {**part, "source": {"type": "base64", "media_type": file.media_type, "data": file.data}}


_FORMS: Mapping[str, tuple[str | None, Callable[[_Part, _File], _Part]]] = {
    "file": ("file", _file_part),
    "input_file": (None, _input_file),
    "input_image": (None, _input_image),
    "image": ("source", _block),
    "document": ("source", _block),
}
"""Type of a part -> (the key of the object with `file_id`, the function that puts the file into it)."""
