"""The body of /v1/media/encode."""

from __future__ import annotations

from typing import Any

from .body import Body


class EncodeBody(Body):
    input: Any
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
