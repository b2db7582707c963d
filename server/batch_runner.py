"""Runs the lines of batches through the server's own endpoints, a few at a time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from uuid import uuid4

from ..callers.errors import SensoriumError, check_utf8, short_repr
from .config import ServerConfig
from .errors import HttpError, error_object, error_response
from .guard import HELD_BYTES, MAX_VALUES, PRIORITY, TENANT, App, BodyBytes, Scope
from .large_json import LARGE, loads, member
from .store import CheckedLines, Store

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Endpoints that the lines of a batch may name."""
_FIELDS = ("custom_id", "method", "url", "body")
_MAX_CUSTOM_ID = 512
_MAX_DEPTH = 128  # of lists and objects in a line
_PAGE = 256  # lines whose numbers are read at once
_ATTEMPTS, _RETRY_SECONDS = 5, 1.0  # of a line that gets the status 429 or 503; the pause doubles
_CLEAN_SECONDS = 3600.0  # between removals of expired files
_UNAVAILABLE = (429, 503)
_GONE = ("engine_dead", "engine_closed", "engine_asleep")  # error codes of an engine that may take no more requests
_NOT_LOADED = ("model_load_failed", "overloaded")  # error codes, with the status 503, of a model that may be loaded later
_DEATHS = ("engine_dead", "interrupted")  # error codes that a line may have caused; it is tried once more
_REASONS = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was finished"),
    "expired": ("batch_expired", "this request could not be finished within the completion window"),
}
_log = logging.getLogger(__name__)


class BatchRunner:
    """The batches in progress.

    A line's result and the fact that it is finished are stored in one transaction. A line without a result runs again after a
    restart, and a line with a result never does.

    Args:
        app: the application whose endpoints answer lines.
        body_bytes: counts the lines that are held, together with the bodies of requests.
    """

    def __init__(self, store: Store, config: ServerConfig, app: App, body_bytes: BodyBytes | None = None) -> None:
        self._store, self._config, self._app, self._body_bytes = store, config, app, body_bytes or BodyBytes()
        self._held = self._held_bytes = 0  # lines in memory, and bytes of these and of their files
        self._with_files = self._for_more = 0  # lines that hold files; those of them that wait for room for more
        self._free = asyncio.Semaphore(config.batch_requests)
        self._alone = asyncio.Lock()  # for further attempts of lines that may have killed the engine
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.interrupted: dict[str, dict[str, Any]] = {}
        """Batch that waits for its next attempt -> error object of the last one."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continue the batches that have not ended, and run new ones until the block ends."""
        for owner, batch in await self._store.call(self._store.running):
            self.start(owner, batch)
        cleaner = asyncio.ensure_future(self._clean())
        try:
            yield
        finally:
            await _cancelled(cleaner, *self._tasks.values())

    async def _clean(self) -> None:
        store = self._store
        while True:
            try:
                await store.call(store.remove_expired)
                while await store.call(store.vacuum):
                    pass  # one page a call, so that other calls of the store run between them
            except HttpError as error:
                _log.warning("expired files are not removed: %s", error)
            await asyncio.sleep(_CLEAN_SECONDS)

    def start(self, owner: str, batch: str) -> None:
        """Run a batch in the background. A batch that already runs is restarted, so that it reads its new status."""
        before = self._tasks.get(batch)
        task = self._tasks[batch] = asyncio.ensure_future(self._run(owner, batch, before))
        task.add_done_callback(lambda _: self._tasks.pop(batch) if self._tasks.get(batch) is task else None)

    async def _run(self, owner: str, batch: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await _cancelled(before)
        while True:
            try:
                await self._run_once(owner, batch)
                self.interrupted.pop(batch, None)
                return
            except Exception as error:
                entry = self.interrupted[batch] = error_object(_cause(error))
                _log.exception("the batch %s is interrupted (%s); it continues in a while", batch, entry["message"])
                await asyncio.sleep(10 * _RETRY_SECONDS)

    async def _run_once(self, owner: str, batch: str) -> None:
        store = self._store
        status = "completed"
        try:
            state = await store.call(store.batch, owner, batch)
            async with asyncio.timeout(state["expires_at"] - store.now):
                if state["status"] == "cancelling":
                    status = "cancelled"
                elif not await self._may_run(batch, state["status"]):
                    return
                else:
                    await self._run_lines(owner, batch, state["endpoint"])
        except TimeoutError:
            status = "expired"
        await store.call(store.end_batch, batch, status, partial(_unfinished, status))

    async def _may_run(self, batch: str, status: str) -> bool:
        """Check the lines of a new batch, and start or fail it. Return whether the batch may run."""
        store, lines, check = self._store, CheckedLines(), partial(_check_line, self._config)
        while status == "validating" and await store.call(store.check_lines, batch, lines, check):
            pass  # one page a call, so that other calls of the store run between them
        return await store.call(store.start_batch, batch, lines)

    async def _run_lines(self, owner: str, batch: str, url: str) -> None:
        after = -1
        async with asyncio.TaskGroup() as group:
            while lines := await self._store.call(self._store.unfinished, batch, after, _PAGE):
                for after, custom_id in lines:
                    await self._free.acquire()
                    try:
                        task = group.create_task(self._run_line(owner, batch, url, after, custom_id))
                    except BaseException:  # a sibling has failed
                        self._free.release()
                        raise
                    task.add_done_callback(lambda _: self._free.release())

    @asynccontextmanager
    async def _holding(self, size: int) -> AsyncIterator[None]:
        """Count a line's bytes, once they fit beside the bodies of requests or no other line is held.

        Lines take at most half of the bytes, so that they leave room for requests.
        """
        limit = self._config.max_total_body_bytes
        while self._held and (self._held_bytes + size > limit // 2 or self._body_bytes.count + size > limit):
            await asyncio.sleep(_RETRY_SECONDS)
        self._count_line(1, size)
        try:
            yield
        finally:
            self._count_line(-1, -size)

    async def hold_files(self, scope: Scope, size: int) -> None:
        """Count further bytes of a line's files until its response, once they fit or no other line holds files.

        A line with files does not wait for those that wait for more as it does: none of them would ever go on.
        """
        limit, has_files = self._config.max_total_body_bytes, HELD_BYTES in scope
        self._for_more += has_files
        try:
            while self._with_files > (self._for_more if has_files else 0) and (
                self._held_bytes + size > limit // 2 or self._body_bytes.count + size > limit
            ):
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._for_more -= has_files
        self._with_files += not has_files
        scope[HELD_BYTES] = scope.get(HELD_BYTES, 0) + size
        self._count_line(0, size)

    def _release_files(self, scope: Scope) -> None:
        if HELD_BYTES in scope:
            self._with_files -= 1
            self._count_line(0, -scope[HELD_BYTES])

    def _count_line(self, count: int, size: int) -> None:
        self._held += count
        self._held_bytes += size
        self._body_bytes.count += size

    async def _run_line(self, owner: str, batch: str, url: str, number: int, custom_id: str) -> None:
        """Store the response to a line. Only a storage error is raised; any other one becomes the line's result."""
        async with self._holding(await self._store.call(self._store.line_size, batch, number)):
            status, response = await self._response(owner, batch, url, number)
        head = json.dumps({"status_code": status, "request_id": f"req-{uuid4().hex}"})
        result = _result(custom_id, b'%s, "body": %s}' % (head[:-1].encode(), response))
        counts = status == 200 and response.startswith(b"{")
        usage = None if not counts else await asyncio.to_thread(_usage, response) if len(response) > LARGE else _usage(response)
        await self._store.call(self._store.finish_line, batch, number, result, status == 200, usage)

    async def _response(self, owner: str, batch: str, url: str, number: int) -> tuple[int, bytes]:
        """Return status and body of the response to a line, or of the error that it ends with."""
        line = await self._store.call(self._store.line, batch, number)
        try:
            body = await asyncio.to_thread(member, line, "body") if len(line) > LARGE else member(line, "body")
            del line
            return await self._answer(url, body, owner)
        except Exception as error:
            _log.exception("a request of a batch failed")
            failed = error_response(error)
            return failed.status_code, bytes(failed.body)

    async def _answer(self, url: str, body: bytes, owner: str) -> tuple[int, bytes]:
        """Return status and body of the response, after further attempts if the engine is busy or has died.

        A line waits for a model that cannot be loaded now until the batch expires, as for an engine that takes no requests.
        """
        pause, attempts, deaths, is_told = _RETRY_SECONDS, 0, 0, False
        while True:
            async with self._alone if deaths else nullcontext():
                status, response = await self._send("POST", url, body, owner)
            if status not in _UNAVAILABLE:
                return status, response
            code = _error_code(response)
            if code in _GONE and await self._was_away(owner):
                continue
            if status == 503 and code in _NOT_LOADED:
                if not is_told:
                    _log.warning("a model cannot be loaded (%s); the lines of batches that need it wait until it can", code)
                is_told = True
                await asyncio.sleep(10 * _RETRY_SECONDS)
                continue
            attempts += 1
            deaths += code in _DEATHS
            if attempts == _ATTEMPTS or deaths == 2:
                return status, response
            await asyncio.sleep(pause)
            pause *= 2

    async def _was_away(self, owner: str) -> bool:
        """Wait until the engine takes requests. Return False if it does already."""
        away = False
        while (await self._send("GET", "/ready", b"", owner))[0] != 200:
            if not away:
                _log.warning("the engine takes no requests; the batches in progress wait until it does")
            away = True
            await asyncio.sleep(10 * _RETRY_SECONDS)
        return away

    async def _send(self, method: str, path: str, content: bytes, owner: str) -> tuple[int, bytes]:
        """Return status and body of the response to a request of this owner. A plain text becomes a string of JSON."""
        sent, status, is_text, parts = False, 500, False, list[bytes]()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # no disconnect ever comes; the task may be cancelled
            sent = True
            return {"type": "http.request", "body": content}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status, is_text
            status = message.get("status", status)
            is_text |= any(value.startswith(b"text/") for name, value in message.get("headers", ()) if name == b"content-type")
            parts.append(message.get("body", b""))

        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            TENANT: owner or None,
            PRIORITY: 1,
        }
        try:
            await self._app(scope, receive, send)
        finally:
            self._release_files(scope)
        body = b"".join(parts)
        return status, json.dumps(body.decode()).encode() if is_text else body


def _cause(error: Exception) -> Exception:
    """Return the first exception of a group, or an exception that is none."""
    return _cause(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _result(custom_id: str, response: bytes, error: Mapping[str, Any] | None = None) -> bytes:
    """Return a line of an output or error file. `response` is JSON, which is copied as it is."""
    head = json.dumps({"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "error": error})
    return b'%s, "response": %s}\n' % (head[:-1].encode(), response.replace(b"\n", b" "))


def _usage(response: bytes) -> dict[str, Any] | None:
    """Return the tokens of a response in the form of a batch's usage; None if it counts no tokens."""
    usage = json.loads(member(response, "usage") or b"null")
    if not isinstance(usage, dict) or "total_tokens" not in usage:
        return None
    inputs = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    outputs = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage.get("input_tokens", usage.get("prompt_tokens", 0)),
        "input_tokens_details": {"cached_tokens": inputs.get("cached_tokens") or 0},
        "output_tokens": usage.get("output_tokens", usage.get("completion_tokens", 0)),
        "output_tokens_details": {"reasoning_tokens": outputs.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }


def _unfinished(status: str, custom_id: str) -> bytes:
    code, message = _REASONS[status]
    return _result(custom_id, b"null", {"code": code, "message": message})


def _error_code(response: bytes) -> str | None:
    try:
        code: str | None = json.loads(response)["error"]["code"]
        return code
    except (ValueError, KeyError, TypeError):
        return None


def _is_deep(value: object) -> bool:
    """Return whether lists and objects are nested more than _MAX_DEPTH deep."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [container for container in level if isinstance(container, list | dict)]
        level = [inner for container in nested for inner in (container.values() if isinstance(container, dict) else container)]
    return any(isinstance(container, list | dict) for container in level)


def _check_line(config: ServerConfig, line: bytes, request: Mapping[str, Any]) -> str:
    """Return the custom_id of a line of a batch's input."""
    if len(line) > config.max_body_bytes or sum(map(line.count, (b",", b"[", b"{"))) > MAX_VALUES:
        reason = f"the line has more than {config.max_body_bytes} bytes (max_body_bytes) or {MAX_VALUES} values"
        raise HttpError(400, f"{reason}; make it smaller", "line_too_large")
    try:
        entry = loads(line)
        deep = _is_deep(entry)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise HttpError(400, f"the line is not JSON: {error}", "invalid_json_line") from None
    if deep:
        reason = f"the line has lists and objects that are nested more than {_MAX_DEPTH} deep; make it flatter"
        raise HttpError(400, reason, "invalid_json_line")
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise HttpError(400, f"the line must be an object with {', '.join(_FIELDS)}", "invalid_request")
    custom_id, body = entry["custom_id"], entry["body"]
    try:
        if not isinstance(custom_id, str) or not 0 < len(check_utf8(custom_id, "custom_id")) <= _MAX_CUSTOM_ID:
            reason = f"custom_id={short_repr(custom_id)} must be a string of 1 to {_MAX_CUSTOM_ID} characters"
            raise HttpError(400, reason, "invalid_custom_id", "custom_id")
    except SensoriumError as error:
        raise HttpError(400, str(error), "invalid_custom_id", "custom_id") from None
    if entry["method"] != "POST":
        raise HttpError(400, f"method={short_repr(entry['method'])} must be POST", "invalid_method", "method")
    if entry["url"] != request["endpoint"]:
        reason = f"url={short_repr(entry['url'])} must be the batch's endpoint, {request['endpoint']}"
        raise HttpError(400, reason, "mismatched_endpoint", "url")
    if not isinstance(body, dict):
        raise HttpError(400, "body must be an object", "invalid_request", "body")
    for name in ("stream", "background"):
        if body.get(name) not in (None, False):
            reason = f"body.{name} must not be true in a batch, which stores complete responses; leave it out"
            raise HttpError(400, reason, "invalid_request", f"body.{name}")
    return custom_id
