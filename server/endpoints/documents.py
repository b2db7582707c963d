"""/v1/documents: a PDF or picture as text, page by page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...pipelines.documents.api import PageDone
from ...pipelines.documents.blocks import Document
from ...pipelines.documents.projections import Projected, page_fields, project
from ...pipelines.option_types import ReadKeywords
from ..events import to_event
from ..forms import read_form
from ..model_routes import with_model
from ..protocol.documents import DocumentForm
from ..state import Server, cache_salt, new_id, server_of, unless_disconnected
from ..streams import open_stream

_TYPES = {"md": "text/markdown", "txt": "text/plain"}


async def documents(request: Request) -> Response:
    """Read a document; pages without a good text layer are read by the model."""
    async with read_form(request, DocumentForm) as (form, file):
        data, name = await file.read(), file.filename or ""
    return await with_model(request, form.model, form.stream, partial(_read, request, form, data, name))


async def _read(request: Request, form: DocumentForm, data: bytes, name: str) -> Response:
    server = server_of(request)
    options = _options(request, form)
    if form.stream:
        events = _events(server, form, data, name, options)
        return await open_stream(request, events, partial(_resume, events), with_done=False)
    (document,) = await unless_disconnected(request, server.llm.read(data, **options))
    return await asyncio.to_thread(_response, server, form, document, name)  # a document may be large


def _response(server: Server, form: DocumentForm, document: Document, name: str) -> Response:
    fields = _fields(server, form, document, name)
    if form.response_format == "json":
        return JSONResponse(fields)
    return Response(fields["content"], media_type=_TYPES[form.response_format])


def _options(request: Request, form: DocumentForm) -> ReadKeywords:
    options: ReadKeywords = {"pages": form.pages, "text_layer": form.text_layer}
    config = server_of(request).config
    options |= {"max_pages": config.max_document_pages, "max_characters": config.max_document_characters}
    options["cache_salt"] = cache_salt(request, form.cache_salt)
    options["adapter"] = server_of(request).adapter_of(form.model)
    options["convert_office"] = False  # LibreOffice is no program for files of strangers
    if form.question is not None:
        options["question"] = form.question
    if form.max_tokens is not None:
        options["max_tokens"] = form.max_tokens
    return options


def _fields(server: Server, form: DocumentForm, document: Document, name: str) -> dict[str, Any]:
    """Return the object of a document that was read: its pages, or its content in another format.

    Raises:
        SensoriumError: it could not be opened.
    """
    if document.error is not None:
        raise document.error.exception()
    head = {
        "id": new_id("doc-"),
        "object": "document",
        "created": int(time.time()),
        "model": server.adapter_of(form.model) or server.name,
        "filename": name,
    }
    head |= {"page_count": len(document.pages), "failed_pages": [page.number for page in document.failed]}
    if form.response_format == "json":
        return {**head, "pages": [page_fields(page) for page in document.pages]}
    return {**head, "content": "".join(project(Projected(name, None, document.pages), form.response_format))}


async def _events(
    server: Server, form: DocumentForm, data: bytes, name: str, options: ReadKeywords
) -> AsyncGenerator[dict[str, Any] | str, None]:
    """Yield an event for each page that has been read, and the document's, which is a text already: it may be large."""
    loop, pages, num_done = asyncio.get_running_loop(), asyncio.Queue[PageDone | None](), 0

    def on_page(page: PageDone) -> None:  # called in other threads
        loop.call_soon_threadsafe(pages.put_nowait, page)

    work = asyncio.ensure_future(server.llm.read(data, on_page=on_page, **options))
    work.add_done_callback(lambda _: pages.put_nowait(None))
    try:
        while (page := await pages.get()) is not None:
            num_done += 1
            error = None if page.error is None else {"code": page.error.code, "message": page.error.message}
            counts = {"pages_done": num_done, "page_count": page.num_pages}
            yield {"type": "document.page.done", "page": page.page, **counts, "way": page.way, "error": error}
        (document,) = await work
        yield await asyncio.to_thread(_last_event, server, form, document, name)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _last_event(server: Server, form: DocumentForm, document: Document, name: str) -> str:
    return to_event({"type": "document.done", "document": _fields(server, form, document, name)})


async def _resume(
    events: AsyncGenerator[dict[str, Any] | str, None], first: dict[str, Any] | str
) -> AsyncGenerator[dict[str, Any] | str, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
