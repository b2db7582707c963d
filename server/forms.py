"""Bodies that are forms with a file."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from ..callers.errors import InputError
from .errors import HttpError, validation_error

F = TypeVar("F", bound=BaseModel)
_NO_FILE = "file is missing; give it as the part `file` of the form, with a file name, as `curl -F file=@talk.wav` does"
_MAX_FIELDS, _MAX_FIELD_BYTES = 64, 4 << 20  # a clip of a known speaker is a field
logging.getLogger("python_multipart").addHandler(logging.NullHandler())  # it warns of broken forms; the client gets the error


@asynccontextmanager
async def read_form(request: Request, kind: type[F], lists: tuple[str, ...] = ()) -> AsyncIterator[tuple[F, UploadFile]]:
    """Yield the fields of a form and its file, which is open until the block ends.

    Args:
        lists: fields that are lists, written as `name[]`. Fields `name[key]` make an object.
    """
    kind_of_body = request.headers.get("content-type", "").lower()
    if kind_of_body.startswith("application/x-www-form-urlencoded"):
        raise InputError(_NO_FILE, param="file")
    if not kind_of_body.startswith("multipart/form-data"):
        reason = "the body must be a form with the header Content-Type: multipart/form-data"
        raise HttpError(415, reason, "unsupported_media_type")
    async with _open_form(request) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InputError(_NO_FILE, param="file")
        fields: dict[str, Any] = {}
        for key in form:
            name, _, inner = key.removesuffix("[]").removesuffix("]").partition("[")
            if name == "file":
                continue
            if inner:
                fields[name] = {**_object(fields.get(name)), inner: form.get(key)}
            else:
                fields[name] = form.getlist(key) if name in lists else form.get(key)
        try:
            values = kind.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error) from None
        yield values, file


@asynccontextmanager
async def _open_form(request: Request) -> AsyncIterator[FormData]:
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    except HTTPException as error:
        if error.status_code != 400:
            raise
        reason = f"the body is not a form that can be read ({str(error.detail).rstrip('.')})"
        how = "let a library of HTTP write it, with its boundary in Content-Type"
        raise HttpError(400, f"{reason}; {how}", "invalid_input") from None
    try:
        yield form
    finally:
        await form.close()


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
