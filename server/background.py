"""Responses in the background: they go on without the connection that asked for them, and their events can be followed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import copy_context
from typing import Any, Protocol

from ..engine.frontend.trace import on_request_end
from .access_log import log_background
from .drain import Draining
from .errors import HttpError, error_object
from .events import COMMENT, WAIT_SECONDS, to_event
from .guard import BodyBytes
from .request_record import RequestRecord, current_record

Event = dict[str, Any]
STOPPED = {"code": "server_error", "message": "the server was stopped before the response was completed; send it again"}
"""The error of responses that the end of the server has ended."""
_KEPT_SECONDS = 300.0  # how long the events of a finished stream can be read
_KEPT_EVENTS, _KEPT_BYTES = 1 << 18, 64 << 20  # maximum number and bytes of the events of all finished streams
_log = logging.getLogger(__name__)


class StateKeeper(Protocol):
    """Stores the states of one response."""

    async def add(self, response: dict[str, Any], finished: bool = True) -> None: ...

    async def update(self, response: dict[str, Any]) -> None: ...


class BackgroundResponse:
    """A response in the background.

    Attributes:
        keeps_events: its events are kept for `follow`.
        events: those that are kept.
        num_bytes: their size.
        task: computes it.
        status: that of the response now.
    """

    task: asyncio.Task[None]

    def __init__(self, response: dict[str, Any], keep: StateKeeper, keeps_events: bool) -> None:
        self.keeps_events, self.is_cancelled = keeps_events, False
        self._response, self._keep = response, keep
        self.events, self.num_bytes = list[bytes](), 0
        self.status = str(response["status"])
        self._number, self._ended, self._more = 0, False, asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events behind this sequence number as they come, with comments in between."""
        index = after + 1
        while True:
            more = self._more
            for event in self.events[index:]:
                index += 1
                yield event
            if index >= self._number and self._ended:
                return
            try:
                await asyncio.wait_for(more.wait(), WAIT_SECONDS)
            except TimeoutError:
                yield COMMENT.encode()

    async def run(self, events: AsyncGenerator[Event, None]) -> None:
        """Publish the events, and store the response whenever one of them has it."""
        try:
            self._publish({"type": "response.created", "response": self._response})
            self._publish({"type": "response.queued", "response": self._response})
            async with aclosing(events):
                async for event in events:
                    if "response" in event:
                        await self._keep.update(event["response"])
                    self._publish(event)
        except asyncio.CancelledError:
            if self.is_cancelled:
                await self._cut_off("incomplete", status="cancelled")  # OpenAI's events have no type of their own for it
            else:
                await self._cut_off("failed", status="failed", error=STOPPED)
        except Exception as error:  # the store is full, or cannot be written
            _log.exception("a response in the background has failed")
            reason = {"code": "server_error", "message": error_object(error)["message"]}
            await self._cut_off("failed", status="failed", error=reason)
        finally:
            self._ended = True
            self._more.set()
            del self._keep  # it has the input of the request

    async def _cut_off(self, kind: str, **fields: Any) -> None:
        """Store the response with its last fields, and publish the last event even if it cannot be stored."""
        response = {**self._response, **fields}
        try:
            await self._keep.update(response)
        except Exception:
            _log.exception("the end of a response in the background is not stored; the next start of the server ends it")
        self._publish({"type": f"response.{kind}", "response": response})

    def _publish(self, event: Event) -> None:
        event["sequence_number"] = self._number
        self._number += 1
        if "response" in event:
            self.status = event["response"]["status"]
        if self.keeps_events:
            self.events.append(to_event(event).encode("utf-8", "surrogatepass"))
            self.num_bytes += len(self.events[-1])
        self._more.set()
        self._more = asyncio.Event()


class Background:
    """The responses in the background: those in progress, and those that have ended and whose events are kept.

    Args:
        most: maximum number of responses in progress.
        body_bytes: counts the bodies of the responses in progress.
        logs: log a line at the end of each response.
    """

    def __init__(self, most: int, draining: Draining, body_bytes: BodyBytes, logs: bool = True) -> None:
        self._most, self._draining, self._body_bytes, self._logs = most, draining, body_bytes, logs
        self._running: dict[str, BackgroundResponse] = {}
        self._ended: dict[str, BackgroundResponse] = {}  # the first to end is the first one
        self._kept_events = self._kept_bytes = 0

    async def start(
        self,
        response: dict[str, Any],
        events: AsyncGenerator[Event, None],
        keep: StateKeeper,
        keeps_events: bool,
        size: int = 0,
        record: RequestRecord | None = None,
    ) -> BackgroundResponse:
        """Store a queued response and start computing it.

        Args:
            events: those from "in_progress" on.
            size: bytes of the request, counted in `body_bytes`, which are subtracted when the response ends.
            record: gets the response's tokens, and is logged when it ends.

        Raises:
            HttpError: there are too many, or the key has too many bytes.
        """
        if len(self._running) >= self._most:
            reason = f"the server has {self._most} responses in the background (max_requests); try again later"
            raise HttpError(429, reason, "overloaded")
        await keep.add(response, finished=False)
        running = BackgroundResponse(response, keep, keeps_events)
        context = copy_context()
        if record is not None:
            context.run(current_record.set, record)
            context.run(on_request_end.set, record.count_tokens)
        running.task = asyncio.create_task(running.run(events), context=context)
        self._running[response["id"]] = running
        self._draining.tasks.add(running.task)
        running.task.add_done_callback(lambda _: self._end(response["id"], size, record))
        return running

    def with_events(self, response_id: str) -> BackgroundResponse | None:
        """Return a response whose events can be followed from the first one on, or None."""
        running = self._running.get(response_id)
        return running if running is not None and running.keeps_events else self._ended.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """End a response. One that has ended, or is not known, stays as it is."""
        running = self._running.get(response_id)
        if running is not None and not running.task.done():
            running.is_cancelled = True
            running.task.cancel()
            await asyncio.wait({running.task})

    async def close(self, seconds: float) -> None:
        """Wait for the responses in progress, and end those that take longer."""
        tasks = {running.task for running in self._running.values()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _end(self, response_id: str, size: int, record: RequestRecord | None) -> None:
        """Forget a response, or keep its events while they have room."""
        ended = self._running.pop(response_id)
        if record is not None and self._logs:
            log_background(record, response_id, ended.status)
        self._draining.tasks.discard(ended.task)
        self._body_bytes.count -= size
        if not ended.keeps_events:
            return
        self._ended[response_id] = ended
        self._kept_events += len(ended.events)
        self._kept_bytes += ended.num_bytes
        while self._kept_events > _KEPT_EVENTS or self._kept_bytes > _KEPT_BYTES:
            self._drop(next(iter(self._ended)))
        asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._drop, response_id)

    def _drop(self, response_id: str) -> None:
        ended = self._ended.pop(response_id, None)
        if ended is not None:
            self._kept_events -= len(ended.events)
            self._kept_bytes -= ended.num_bytes
