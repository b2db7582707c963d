"""Streams: server-sent events in the form of OpenAI's, and lines of JSON in the form of Ollama's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from .error_shapes import anthropic_body, is_anthropic, ollama_body
from .errors import HttpError, error_body, error_object
from .request_record import stream_error

WAIT_SECONDS = 3.0
"""Time between comments: proxies end connections on which nothing is sent for 30 to 60 seconds."""
COMMENT = ": waiting\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold events back


async def events_of(chunks: AsyncGenerator[Mapping[str, Any] | str, None], with_done: bool) -> AsyncGenerator[str, None]:
    """Yield one event per chunk, and close the chunks at the end.

    Args:
        chunks: a text is an event already.
        with_done: `[DONE]` ends the stream.
    """
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk if isinstance(chunk, str) else to_event(chunk)
        except Exception as error:  # the status was sent already
            yield to_event(error_body(stream_error(error))[1])
        else:
            if with_done:
                yield "data: [DONE]\n\n"


def json_lines(chunks: AsyncGenerator[Mapping[str, Any], None]) -> StreamingResponse:
    """Return a response with one line of JSON per chunk, which closes the generator if the client leaves."""
    return StreamingResponse(_lines(chunks), media_type="application/x-ndjson", headers=STREAM_HEADERS)


async def _lines(chunks: AsyncGenerator[Mapping[str, Any], None]) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _line(chunk)
        except Exception as error:  # the status was sent already
            yield _line(ollama_body(error_body(stream_error(error))[1]))


def error_chunk(scope: MutableMapping[str, Any], content_type: str, error: HttpError) -> bytes | None:
    """Return an error as the last part of a stream that has begun, or None if the response is not a stream."""
    body: dict[str, Any] = {"error": error_object(error)}
    if content_type.startswith("text/event-stream"):
        return to_event(anthropic_body(error.status, body) if is_anthropic(scope) else body).encode()
    return _line(ollama_body(body)).encode() if content_type.startswith("application/x-ndjson") else None


def _line(chunk: Mapping[str, Any]) -> str:
    return f"{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n"


def to_event(chunk: Mapping[str, Any]) -> str:
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
