"""Stored responses of /v1/responses: what is kept of a request, the turns before it, and the endpoints that read and delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ...callers.errors import InputError, check_utf8
from ..errors import HttpError
from ..events import STREAM_HEADERS
from ..guard import TENANT
from ..protocol.response_input import stored_items
from ..protocol.responses import ResponsesBody
from ..response_store import UNFINISHED
from ..state import services_of
from ..store import Store
from ..uploaded_files import with_files


@dataclass(frozen=True)
class Keeper:
    """Stores a response with the input of its request.

    Args:
        items: the input, without the turns before.
    """

    store: Store
    owner: str
    items: Sequence[dict[str, Any]]

    async def add(self, response: dict[str, Any], finished: bool = True) -> None:
        await self.store.call(self.store.add_response, self.owner, response, self.items, finished)

    async def update(self, response: dict[str, Any]) -> None:
        """Replace what `add` has stored."""
        finished = response["status"] not in UNFINISHED
        await self.store.call(self.store.update_response, self.owner, response, finished)


async def keeper(request: Request, body: ResponsesBody) -> Keeper | None:
    """Return what stores the response, or None if it is not stored: without a folder, or unless the request asks for it.

    A response after a stored one is stored unless the request says otherwise.

    Raises:
        HttpError: the key has too many bytes.
    """
    store = services_of(request).store
    wanted = body.previous_response_id is not None or body.background if body.store is None else body.store
    if body.background and (store is None or not wanted):
        reason = "<<param>> needs a response that is stored; leave store=false out, or start the server with --data-dir FOLDER"
        raise InputError(reason, code="unsupported", param="background")
    if store is None or not wanted:
        return None
    if body.prompt_token_ids is not None:
        raise InputError("<<param>> needs an input of messages, not of token ids", code="invalid_value", param="store")
    owner, items = _owner(request), stored_items(body.input)  # type: ignore[arg-type]
    await store.call(store.check_input, owner, items)
    return Keeper(store, owner, items)


async def with_history(request: Request, body: ResponsesBody) -> tuple[ResponsesBody, dict[str, str]]:
    """Return the request with the turns up to its previous response and the files that it names, and where its items were.

    Raises:
        HttpError: there is no such response.
        InputError: the server stores no responses.
    """
    previous = body.previous_response_id
    body = await _with_files(request, body)
    if previous is None:
        return body, {}
    store, limit = services_of(request).store, services_of(request).config.max_body_bytes
    if store is None:
        reason = "this server stores no responses; send the whole conversation as input, or start it with --data-dir FOLDER"
        raise InputError(f"<<param>> cannot be honoured: {reason}", code="unsupported", param="previous_response_id")
    check_utf8(previous, "previous_response_id")
    turns = await store.call(store.turns, _owner(request), previous, limit)
    turns = await with_files(request, turns, "previous_response_id")
    if isinstance(body.input, str):
        places = {f"input[{len(turns)}]": "input"}
    else:
        places = {f"input[{len(turns) + index}]": f"input[{index}]" for index in range(len(body.input))}
    return body.after(turns), places


async def _with_files(request: Request, body: ResponsesBody) -> ResponsesBody:
    if isinstance(body.input, str):
        return body
    return body.model_copy(update={"input": await with_files(request, body.input, "input")})


async def response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a response, or with `stream` the events of one in the background that follow this sequence number."""
    store, background = _store(request), services_of(request).background
    stored = await store.call(store.response, _owner(request), response_id)
    if not stream:
        return JSONResponse(stored)
    running = background.with_events(response_id)
    if running is None:
        reason = "the events of this response are not kept; only those with background=true and stream=true are, until some"
        raise HttpError(400, f"{reason} minutes after their end, or until others need the room", "unsupported", "stream")
    return StreamingResponse(running.follow(starting_after), media_type="text/event-stream", headers=STREAM_HEADERS)


async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response in the background. One that has ended stays as it is."""
    store = _store(request)
    stored = await store.call(store.response, _owner(request), response_id)
    if not stored.get("background"):
        reason = "only a response with background=true can be cancelled; close the connection to end another one"
        raise HttpError(400, reason, "unsupported", "response_id")
    await services_of(request).background.cancel(response_id)
    return JSONResponse(await store.call(store.response, _owner(request), response_id))


async def delete_response(response_id: str, request: Request) -> Response:
    store = _store(request)
    await store.call(store.response, _owner(request), response_id)
    await services_of(request).background.cancel(response_id)
    await store.call(store.delete_response, _owner(request), response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the items of a response's own input."""
    store = _store(request)
    items = await store.call(store.input_items, _owner(request), response_id)
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise HttpError(404, f"after={after!r} is not an id of an item of this response", "not_found", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return JSONResponse(
        {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > len(page)}
    )


def _store(request: Request) -> Store:
    store = services_of(request).store
    if store is None:
        reason = "this server has no folder for responses; start it with --data-dir FOLDER"
        raise HttpError(404, reason, "not_configured", "data_dir")
    return store


def _owner(request: Request) -> str:
    return request.scope[TENANT] or ""
