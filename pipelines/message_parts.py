"""Media as content parts of a message."""

from __future__ import annotations

from typing import Any

from ..mm.parse import trusted_source
from ..mm.types import Media


def media_part(modality: str, item: object) -> dict[str, Any]:
    """Return the content part for an item in any accepted form. The uuid and options of a `Media` become keys of the part."""
    media = item if isinstance(item, Media) else Media(item)
    uuid = {} if media.uuid is None else {"uuid": media.uuid}
    return {"type": modality, modality: trusted_source(media.data), **uuid, **media.options}
