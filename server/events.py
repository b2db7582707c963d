"""Server-sent events in the form of OpenAI's streams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from ..engine.errors import error_info
from .errors import error_body

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold events back


def event_stream(chunks: AsyncGenerator[Mapping[str, Any], None], with_done: bool = True) -> StreamingResponse:
    """Return a response with one event per chunk, which closes the generator if the client leaves.

    Args:
        with_done: `[DONE]` ends the stream.
    """
    return StreamingResponse(_events(chunks, with_done), media_type="text/event-stream", headers=_HEADERS)


async def _events(chunks: AsyncGenerator[Mapping[str, Any], None], with_done: bool) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield to_event(chunk)
        except Exception as error:  # the status was sent already
            yield to_event(error_body(error_info(error, "a request"))[1])
        else:
            if with_done:
                yield "data: [DONE]\n\n"


def to_event(chunk: Mapping[str, Any]) -> str:
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
