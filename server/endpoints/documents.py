"""/v1/documents: a PDF or picture as text, page by page."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...callers.errors import ErrorInfo, InputError
from ...pipelines.documents.api import PageDone
from ...pipelines.documents.blocks import Document
from ...pipelines.documents.pictures import page_picture
from ...pipelines.documents.projections import Projected, page_fields, project
from ...pipelines.documents.searchable import searchable_pdf
from ...pipelines.option_types import ReadKeywords
from ..events import to_event
from ..forms import read_form
from ..model_routes import with_model
from ..protocol.documents import DocumentForm
from ..state import Server, cache_salt, new_id, server_of, unless_disconnected
from ..streams import open_stream

_TYPES = {
    "md": "text/markdown",
    "txt": "text/plain",
    "html": "text/html",
    "csv": "text/csv",
    "docling": "application/json",
    "hocr": "application/xhtml+xml",
    "alto": "application/xml",
    "pdf": "application/pdf",
}
"""Content types of `DocumentFormat`."""


async def documents(request: Request) -> Response:
    """Read a document; pages without a good text layer are read by the model."""
    async with read_form(request, DocumentForm, ("include",)) as (form, file):
        data, name = await file.read(), file.filename or ""
    _check(form)
    return await with_model(request, form.model, form.stream, partial(_read, request, form, data, name))


def _check(form: DocumentForm) -> None:
    """Raise InputError if fields of a form do not fit each other."""
    if form.page_image_size is not None and not form.stream:
        reason = f"<<param=>>{form.page_image_size} needs stream=true: each event has the picture of one page"
        raise InputError(reason, code="invalid_value", param="page_image_size", value=form.page_image_size)
    if form.include and form.response_format != "json":
        reason = f"<<param=>>{','.join(form.include)} needs response_format=json, which has room for several formats"
        raise InputError(reason, code="invalid_value", param="include")


async def _read(request: Request, form: DocumentForm, data: bytes, name: str) -> Response:
    server = server_of(request)
    options = _options(request, form)
    if form.stream:
        events = _events(server, form, data, name, options)
        return await open_stream(request, events, partial(_resume, events), with_done=False)
    (document,) = await unless_disconnected(request, server.llm.read(data, **options))
    return await asyncio.to_thread(_response, server, form, document, data, name)  # a document may be large


def _response(server: Server, form: DocumentForm, document: Document, data: bytes, name: str) -> Response:
    if form.response_format == "json":
        return JSONResponse(_fields(server, form, document, data, name))
    _raise_error(document)
    content = _content(server, document, data, name, form.response_format)
    headers = {"Content-Security-Policy": "sandbox"}  # a page of somebody else's text gets no rights of this server
    return Response(content, headers=headers, media_type=_TYPES[form.response_format])


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


def _fields(server: Server, form: DocumentForm, document: Document, data: bytes, name: str) -> dict[str, Any]:
    """Return the object of a document that was read: its pages, or its content in another format.

    Raises:
        SensoriumError: it could not be opened, or no searchable PDF can be made of it.
    """
    _raise_error(document)
    head = {
        "id": new_id("doc-"),
        "object": "document",
        "created": int(time.time()),
        "model": server.adapter_of(form.model) or server.name,
        "filename": name,
    }
    head |= {"page_count": len(document.pages), "failed_pages": [page.number for page in document.failed]}
    if form.response_format != "json":
        return {**head, "content": _json_content(server, document, data, name, form.response_format)}
    return {**head, "pages": [page_fields(page) for page in document.pages], **_contents(server, form, document, data, name)}


def _contents(server: Server, form: DocumentForm, document: Document, data: bytes, name: str) -> dict[str, Any]:
    """Return the document in further formats, and why it cannot be given in some of them: its pages are read all the same."""
    contents, errors = dict[str, str](), dict[str, Any]()
    for output_format in form.include:
        try:
            contents[output_format] = _json_content(server, document, data, name, output_format)
        except InputError as error:
            errors[output_format] = _error(error.info)
    return {name: value for name, value in (("contents", contents), ("content_errors", errors)) if value}


def _raise_error(document: Document) -> None:
    if document.error is not None:
        raise document.error.exception()


def _content(server: Server, document: Document, data: bytes, name: str, output_format: str) -> bytes | str:
    """Return a document in a format of `DocumentFormat`: bytes if that is PDF."""
    if output_format == "pdf":
        return searchable_pdf(data, document.pages, server.engine.config.media)
    return "".join(project(Projected(name, None, document.pages), output_format))


def _json_content(server: Server, document: Document, data: bytes, name: str, output_format: str) -> str:
    content = _content(server, document, data, name, output_format)
    return content if isinstance(content, str) else base64.b64encode(content).decode()


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
            error = _error(page.error)
            counts = {"pages_done": num_done, "page_count": page.num_pages}
            fields: dict[str, Any] = {
                "type": "document.page.done",
                "page": page.page,
                **counts,
                "way": page.way,
                "error": error,
            }
            if form.page_image_size is not None:
                fields |= await asyncio.to_thread(_image, server, data, page.page, form.page_image_size, options["cache_salt"])
            yield fields
        (document,) = await work
        yield await asyncio.to_thread(_last_event, server, form, document, data, name)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _image(server: Server, data: bytes, page: int, size: int, salt: str | None) -> dict[str, Any]:
    """Return the picture of a page as a data URL, or why it has none."""
    picture = page_picture(data, page, size, server.engine.config.media, salt)
    url = None if picture.jpeg is None else f"data:image/jpeg;base64,{base64.b64encode(picture.jpeg).decode()}"
    return {"image": url, "image_error": _error(picture.error)}


def _error(error: ErrorInfo | None) -> dict[str, Any] | None:
    return None if error is None else {"code": error.code, "message": error.message}


def _last_event(server: Server, form: DocumentForm, document: Document, data: bytes, name: str) -> str:
    return to_event({"type": "document.done", "document": _fields(server, form, document, data, name)})


async def _resume(
    events: AsyncGenerator[dict[str, Any] | str, None], first: dict[str, Any] | str
) -> AsyncGenerator[dict[str, Any] | str, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
