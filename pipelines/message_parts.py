"""Media as parts of a message, from what a caller's own code hands over. Knows no question and no model."""

from __future__ import annotations

from typing import Any

from ..mm.parse import callers_own
from ..mm.types import Media


def media_part(modality: str, given: object) -> dict[str, Any]:
    """A content part; name and options of a `Media` stand on it."""
    media = given if isinstance(given, Media) else Media(given)
    named = {} if media.uuid is None else {"uuid": media.uuid}
    return {"type": modality, modality: callers_own(media.data), **named, **media.options}
