"""The form of /v1/documents."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from .body import Body

DocumentFormat = Literal["md", "txt", "html", "csv", "docling", "hocr", "alto", "pdf"]
"""Formats of a document, beside the JSON of its pages. Searchable PDFs are base64 in JSON and in events."""


class DocumentForm(Body):
    """Values of a form are texts, so numbers are converted."""

    model_config = ConfigDict(strict=False)
    response_format: Literal[DocumentFormat, "json"] = "json"
    pages: str | None = Field(None, max_length=4096)
    text_layer: Literal["auto", "always", "never"] = "auto"
    question: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    include: tuple[DocumentFormat, ...] = ()
    page_image_size: int | None = Field(None, ge=64, le=2048)
    cache_salt: str | None = None
