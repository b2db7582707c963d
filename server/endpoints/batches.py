"""/v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ...callers.errors import InputError, check_utf8, short_repr
from ..batch_runner import ENDPOINTS
from ..errors import HttpError
from ..forms import read_form
from ..guard import TENANT
from ..protocol.batches import BatchBody, FileForm
from ..response_store import KEPT_SECONDS
from ..state import services_of
from ..store import MAX_LINES, Store

_MAX_NAME = 255
_BLOCK_BYTES = 1 << 20
_MAX_KEY, _MAX_VALUE = 64, 512


async def upload(request: Request) -> Response:
    """Store a file of requests for a batch, or one that messages may name."""
    store, owner = _store(request)
    config = services_of(request).config
    async with read_form(request, FileForm) as (form, file):
        if file.size is None or file.size > config.max_file_bytes:
            reason = f"file has more than {config.max_file_bytes} bytes (max_file_bytes); split it"
            raise HttpError(413, reason, "file_too_large", "file")
        name = (file.filename or "upload").encode("utf-8", "replace").decode()[:_MAX_NAME]
        kept = KEPT_SECONDS if form.expires_after is None else form.expires_after.seconds
        blocks = _lines(file.file) if form.purpose == "batch" else iter(partial(file.file.read, _BLOCK_BYTES), b"")
        return JSONResponse(await store.call(store.add_file, owner, name, blocks, kept, form.purpose))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    for number, line in enumerate(file):
        if number == MAX_LINES:
            raise HttpError(413, f"file has more than {MAX_LINES} lines; split it", "file_too_large", "file")
        yield line


async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    store, owner = _store(request)
    return _page(await store.call(store.files, owner, after, limit, order == "desc", purpose), limit)


async def file(file_id: str, request: Request) -> Response:
    store, owner = _store(request)
    return JSONResponse(await store.call(store.file, owner, file_id))


async def delete_file(file_id: str, request: Request) -> Response:
    store, owner = _store(request)
    await store.call(store.delete_file, owner, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def file_content(file_id: str, request: Request) -> Response:
    store, owner = _store(request)
    description = await store.call(store.file, owner, file_id)
    size = description["bytes"]
    headers = {"Content-Length": str(size), **_download_headers(description["filename"])}
    options: dict[str, Any] = {"headers": headers, "media_type": "application/octet-stream"}
    if request.method == "HEAD":
        return Response(**options)

    async def content() -> AsyncGenerator[bytes, None]:
        left, after = size, -1
        while left > 0:
            part, after = await store.call(store.content, file_id, after)
            if not part:  # the connection is closed, so that the client sees that the content is cut short
                raise HttpError(404, f"the file {file_id!r} was removed while it was sent", "not_found", "file_id")
            left -= len(part)
            yield part

    return StreamingResponse(content(), **options)


def _download_headers(name: str) -> dict[str, str]:
    """Return the headers that make a browser save a client's file under its name (RFC 6266) instead of showing it."""
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    return {"X-Content-Type-Options": "nosniff", "Content-Disposition": disposition}


async def create_batch(body: BatchBody, request: Request) -> Response:
    """Start a batch: its lines are checked first, and then answered."""
    store, owner = _store(request)
    if body.endpoint not in ENDPOINTS:
        raise InputError(
            f"<<param=>>{short_repr(body.endpoint)} must be one of {', '.join(ENDPOINTS)}",
            code="invalid_value",
            param="endpoint",
        )
    for key, value in (body.metadata or {}).items():
        if len(check_utf8(key, "metadata")) > _MAX_KEY or len(check_utf8(value, "metadata")) > _MAX_VALUE:
            reason = f"metadata has a key of more than {_MAX_KEY} or a value of more than {_MAX_VALUE} characters; shorten it"
            raise InputError(reason, param="metadata")
    kept = KEPT_SECONDS if body.output_expires_after is None else body.output_expires_after.seconds
    check_utf8(body.input_file_id, "input_file_id")
    fields = {name: getattr(body, name) for name in ("input_file_id", "endpoint", "completion_window", "metadata")}
    batch = await store.call(store.add_batch, owner, fields | {"model": services_of(request).default_label or None}, kept)
    services_of(request).batches.start(owner, batch["id"])
    return JSONResponse(batch)


async def list_batches(request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None) -> Response:
    store, owner = _store(request)
    return _page(await store.call(store.batches, owner, after, limit), limit)


async def batch(batch_id: str, request: Request) -> Response:
    store, owner = _store(request)
    stored = await store.call(store.batch, owner, batch_id)
    if (error := services_of(request).batches.interrupted.get(batch_id)) is not None:
        entry = {"code": error["code"], "message": error["message"], "param": None, "line": None}
        stored["errors"] = {"object": "list", "data": [entry]}
    return JSONResponse(stored)


async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Cancel a batch. Its finished lines stay in its output file."""
    store, owner = _store(request)
    stored = await store.call(store.cancel, owner, batch_id)
    services_of(request).batches.start(owner, batch_id)
    return JSONResponse(stored)


def _store(request: Request) -> tuple[Store, str]:
    """Return the store and the owner whose files the request may see."""
    store = services_of(request).store
    if store is None:
        reason = "this server has no folder for files and batches; start it with --data-dir FOLDER"
        raise HttpError(404, reason, "not_configured", "data_dir")
    return store, request.scope[TENANT] or ""


def _page(entries: Sequence[dict[str, Any]], limit: int) -> Response:
    data = entries[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = len(entries) > limit
    return JSONResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})
