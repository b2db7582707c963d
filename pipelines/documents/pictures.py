"""Renders pages of a document as JPEGs, which `/v1/documents` sends to its clients."""

from __future__ import annotations

from dataclasses import dataclass

from ...callers.errors import ErrorInfo
from ...mm.media.isolate import run_isolated
from ...mm.media.page_picture import page_jpeg
from ...mm.media.policy import MediaPolicy
from ...mm.tenants import tenant_of
from .inputs import is_text_document, patiently
from .model_answers import info_of


@dataclass(frozen=True)
class PagePicture:
    """A page as the bytes of a JPEG; None if it has no picture, with the error if it should have one."""

    jpeg: bytes | None = None
    error: ErrorInfo | None = None


def page_picture(data: bytes, number: int, side: int, policy: MediaPolicy, cache_salt: str | None = None) -> PagePicture:
    """Return the picture of a page. Pages of e-books, HTML and text files have none.

    Args:
        data: the document; no office file.
        number: of the page, from 1.
        side: maximum number of pixels of its longer side.
        cache_salt: of the request; its tenant's codec worker makes the picture.
    """
    if is_text_document(data):
        return PagePicture()
    try:
        jpeg = patiently(lambda: run_isolated(page_jpeg, data, number, side, policy, tenant=tenant_of(cache_salt)))
    except Exception as error:
        return PagePicture(error=info_of(error))
    return PagePicture(jpeg.numpy().tobytes())
