"""/v1/media/encode: the encoder rows of media, for a decoder on another machine. It needs `admin_key`."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ...callers.errors import InputError
from ...mm.encoded_json import item_head, row_bytes
from ...mm.types import EncodedItem
from ..inputs import read_input
from ..model_routes import with_model
from ..protocol.encode import EncodeBody
from ..state import checked, server_of, unless_disconnected

MAX_BYTES = 1 << 27
"""Bytes of the rows of one response, which are 180 MB of base64."""
_PART = 3 << 18  # bytes that are encoded at a time; a multiple of 3, so that the parts need no padding


async def encode_media(body: EncodeBody, request: Request) -> Response:
    """Return the rows of each item of the input, in the order of `items`."""
    return await with_model(request, body.model, False, partial(_encode, body, request))


async def _encode(body: EncodeBody, request: Request) -> Response:
    server = server_of(request)
    server.check_model(body.model)
    options = {"mm_processor_kwargs": body.mm_processor_kwargs, "cache_salt": body.cache_salt}
    prompt = {"multi_modal_data": _media(body.input), **{name: value for name, value in options.items() if value is not None}}
    output = checked(await unless_disconnected(request, server.llm.encode_media(prompt)))
    size = sum(item.rows.numel() * item.rows.itemsize for item in output.encoded)
    if size > MAX_BYTES:
        reason = f"the rows of <<param>> have {size:,} bytes, above the limit of {MAX_BYTES:,} for one response"
        raise InputError(
            f"{reason}; send fewer or smaller items", code="over_limit", param="input", limit=MAX_BYTES, value=size
        )
    head = {"object": "media.encoding", "model": server.name}
    written = asyncio.to_thread(_serialise, head, [plan.index for plan in output.items], output.encoded)
    return Response(await unless_disconnected(request, written), media_type="application/json")


def _media(value: object) -> dict[str, Any]:
    """Return the media of an input of embeddings. Raise InputError if it has none, or a text, which has no rows."""
    media = read_input(value, "input")
    if not isinstance(media, Mapping) or "prompt_token_ids" in media or not any(media.values()) or "text" in media:
        reason = "<<param>> must have media and no text; give an object with image, video or audio, or with content"
        raise InputError(reason, code="invalid_value", param="input")
    return {**media}


def _serialise(head: Mapping[str, Any], indices: Sequence[int], items: Sequence[EncodedItem]) -> bytes:
    """Return the JSON of the items, encoded part by part, so that other threads run in between."""
    parts = [json.dumps(head)[:-1].encode(), b', "items": [']
    for number, (index, item) in enumerate(zip(indices, items, strict=True)):
        fields = json.dumps({"index": index, **item_head(item)})
        parts += [b", " if number else b"", fields[:-1].encode(), b', "rows": "', *_base64(item), b'"}']
    return b"".join([*parts, b"]}"])


def _base64(item: EncodedItem) -> Iterator[bytes]:
    return (b64encode(part.numpy()) for part in row_bytes(item).split(_PART))
