"""Bodies that are forms with a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile

from ..mm.errors import InputError
from .errors import HttpError, validation_error

F = TypeVar("F", bound=BaseModel)
_MAX_FIELDS, _MAX_FIELD_BYTES = 64, 1 << 20


@asynccontextmanager
async def read_form(request: Request, kind: type[F], lists: tuple[str, ...] = ()) -> AsyncIterator[tuple[F, UploadFile]]:
    """Yield the fields of a form and its file, which is open until the block ends.

    Args:
        lists: fields that are lists, written as `name[]`. Fields `name[key]` make an object.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        reason = "the body must be a form with the header Content-Type: multipart/form-data"
        raise HttpError(415, reason, "unsupported_media_type")
    async with request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InputError("file is missing; give it as the part `file` of the form", param="file")
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
            found = kind.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error) from None
        yield found, file


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
