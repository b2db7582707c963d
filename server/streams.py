"""Streams of events whose header does not wait for the first output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from .error_shapes import anthropic_body, is_anthropic
from .errors import HttpError, error_body, error_object
from .events import COMMENT, STREAM_HEADERS, WAIT_SECONDS, events_of, to_event
from .request_record import note_error, stream_error
from .state import unless_disconnected

T = TypeVar("T")
Chunks = AsyncGenerator[Mapping[str, Any] | str, None]


async def open_stream(
    request: Request, outputs: AsyncGenerator[T, None], chunks: Callable[[T], Chunks], with_done: bool = True
) -> StreamingResponse:
    """Return a response with one event per chunk, which closes the generators if the client leaves.

    An error of the first output has a status of its own if it comes within WAIT_SECONDS. Then the response's header is sent,
    and a comment follows every WAIT_SECONDS while the request waits or its prompt is computed; a later error is an event.

    Args:
        outputs: those of the request.
        chunks: returns the chunks from the first output on. It raises an error that this output holds.
        with_done: `[DONE]` ends the stream.
    """
    first = asyncio.ensure_future(anext(outputs))
    try:
        await unless_disconnected(request, asyncio.wait({first}, timeout=WAIT_SECONDS))
        if first.done():
            events = events_of(chunks(first.result()), with_done)
        else:
            events = _late_events(request, first, outputs, chunks, with_done)
    except BaseException:
        await _close(first, outputs)
        raise
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _late_events(
    request: Request,
    first: asyncio.Future[T],
    outputs: AsyncGenerator[T, None],
    chunks: Callable[[T], Chunks],
    with_done: bool,
) -> AsyncGenerator[str, None]:
    """Yield comments until the first output is there, and then the events."""
    try:
        while not first.done():
            yield COMMENT
            await asyncio.wait({first}, timeout=WAIT_SECONDS)
        async with aclosing(events_of(chunks(first.result()), with_done)) as events:
            async for event in events:
                yield event
    except Exception as error:  # of the first output
        status, body = error_body(stream_error(error))
        yield to_event(anthropic_body(status, body) if is_anthropic(request.scope) else body)
    finally:
        await _close(first, outputs)


async def open_late(request: Request, ready: asyncio.Future[Any], respond: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of `respond`, which begins a stream, once `ready` is done. Comments are sent if that takes long.

    `ready` is cancelled if the client leaves.
    """
    try:
        await unless_disconnected(request, asyncio.wait({ready}, timeout=WAIT_SECONDS))
        if ready.done():
            ready.result()
            return await respond()
    except BaseException:
        await _cancel(ready)
        raise
    return StreamingResponse(_late_response(request, ready, respond), media_type="text/event-stream", headers=STREAM_HEADERS)


async def _late_response(
    request: Request, ready: asyncio.Future[Any], respond: Callable[[], Awaitable[Response]]
) -> AsyncGenerator[str | bytes | memoryview, None]:
    """Yield comments until the response can begin, and then its events."""
    try:
        while not ready.done():
            yield COMMENT
            await asyncio.wait({ready}, timeout=WAIT_SECONDS)
        ready.result()
        response = await respond()
        assert isinstance(response, StreamingResponse)
        async for event in response.body_iterator:
            yield event
    except Exception as error:
        if isinstance(error, HttpError):
            note_error()
            status, body = error.status, {"error": error_object(error)}
        else:
            status, body = error_body(stream_error(error))
        yield to_event(anthropic_body(status, body) if is_anthropic(request.scope) else body)
    finally:
        await _cancel(ready)


async def _cancel(future: asyncio.Future[Any]) -> None:
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)


async def _close(first: asyncio.Future[T], outputs: AsyncGenerator[T, None]) -> None:
    """Abort a request."""
    await _cancel(first)
    await outputs.aclose()
