"""Stored responses of /v1/responses in the database."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .database import Database
from .errors import HttpError

KEPT_SECONDS = 30 * 24 * 3600
"""How long responses are kept, and files by default; batches are kept a day longer."""
UNFINISHED = ("queued", "in_progress")
"""The status of a response in the background that goes on."""
_CUT_OFF = ("failed", "cancelled")
"""The status of a response that has ended early."""
_MAX_TURNS = 1000
_log = logging.getLogger(__name__)


class StoredResponses(Database):
    """Responses, each with the items of its own input and the id of the response before it."""

    def add_response(
        self, owner: str, response: dict[str, Any], items: Sequence[dict[str, Any]], finished: bool = True
    ) -> None:
        """Store a response. `items`: its input, without the turns before; `finished`: false if `update_response` follows.

        Raises:
            HttpError: the owner has too many bytes.
        """
        texts = [_to_json(items), _to_json(response)]
        size = sum(map(len, texts))
        if size > self._room(owner):
            raise self._full()
        values = (response["id"], owner, response["previous_response_id"], self.now, size, *texts)
        with self._transaction():
            self._remove_old_responses()
            self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            if not finished:
                self._database.execute("INSERT INTO unfinished_responses VALUES (?)", (response["id"],))

    def update_response(self, owner: str, response: dict[str, Any], finished: bool) -> None:
        """Replace a response by its new state, unless it was deleted.

        There is always room for a response that has failed or was cancelled, which is not much longer than before: it would
        remain unfinished otherwise.

        Raises:
            HttpError: the owner has too many bytes.
        """
        text = _to_json(response)
        rows = self._rows("SELECT bytes, length(response) FROM responses WHERE id = ? AND owner = ?", response["id"], owner)
        for size, before in rows:
            if response["status"] not in _CUT_OFF and len(text) - before > self._room(owner):
                raise self._full()
            with self._transaction():
                values = (text, size + len(text) - before, response["id"])
                self._database.execute("UPDATE responses SET response = ?, bytes = ? WHERE id = ?", values)
                if finished:
                    self._database.execute("DELETE FROM unfinished_responses WHERE id = ?", (response["id"],))

    def fail_unfinished(self, error: dict[str, Any]) -> None:
        """End the responses that an earlier process has left unfinished with an error.

        One that cannot be written is logged, and remains for the next start.
        """
        sql = "SELECT id, owner, response FROM responses JOIN unfinished_responses USING (id)"
        for response_id, owner, text in self._rows(sql):
            try:
                self.update_response(owner, {**json.loads(text), "status": "failed", "error": error}, True)
            except (sqlite3.Error, ValueError) as reason:
                _log.warning("the unfinished response %s cannot be ended: %s", response_id, reason)
        with suppress(sqlite3.Error), self._transaction():  # of responses that were deleted
            self._database.execute("DELETE FROM unfinished_responses WHERE id NOT IN (SELECT id FROM responses)")

    def check_input(self, owner: str, items: Sequence[dict[str, Any]]) -> None:
        """Raise HttpError if an owner may not store so many more bytes."""
        if len(_to_json(items)) > self._room(owner):
            raise self._full()

    def response(self, owner: str, response: str, param: str = "response_id") -> dict[str, Any]:
        """Return a response; HttpError if the owner has no such response."""
        body: dict[str, Any] = json.loads(self._response_row(owner, response, param)[1])
        return body

    def input_items(self, owner: str, response: str) -> list[dict[str, Any]]:
        """Return the items of a response's own input."""
        items: list[dict[str, Any]] = json.loads(self._response_row(owner, response, "response_id")[0])
        return items

    def turns(self, owner: str, response: str, max_bytes: int) -> list[dict[str, Any]]:
        """Return the items of a conversation up to a response: the inputs and outputs of all responses before it, and its own.

        Raises:
            HttpError: a response does not exist, or there are too many turns or bytes.
        """
        turns: list[list[dict[str, Any]]] = []
        following: str | None = response
        while following is not None:
            items, text, following = self._response_row(owner, following, "previous_response_id")
            stored = json.loads(text)
            if stored.get("status") in UNFINISHED:
                reason = f"the response {stored['id']!r} is {stored['status']}; wait until it is completed"
                raise HttpError(400, reason, "invalid_value", "previous_response_id")
            turns.append([*json.loads(items), *stored["output"]])
            max_bytes -= len(items) + len(text)
            if max_bytes < 0 or len(turns) > _MAX_TURNS:
                reason = f"the conversation before it has more than {_MAX_TURNS} turns, or more bytes than max_body_bytes"
                raise HttpError(413, f"{reason}; begin a new one", "body_too_large", "previous_response_id")
        return [item for turn in reversed(turns) for item in turn]

    def delete_response(self, owner: str, response: str) -> None:
        self._response_row(owner, response, "response_id")
        with self._transaction():
            self._database.execute("DELETE FROM responses WHERE id = ?", (response,))

    def _response_row(self, owner: str, response: str, param: str) -> tuple[bytes, bytes, str | None]:
        """Return (input, response, id of the response before)."""
        sql = "SELECT input, response, previous FROM responses WHERE id = ? AND owner = ? AND created_at > ?"
        rows = self._rows(sql, response, owner, self.now - KEPT_SECONDS)
        if not rows:
            reason = f"there is no response {response!r} of this key; only those with store=true are kept, for 30 days"
            raise HttpError(404, reason, "not_found", param)
        items, text, previous = rows[0]
        return items, text, previous

    def _remove_old_responses(self) -> None:
        self._database.execute("DELETE FROM responses WHERE created_at <= ?", (self.now - KEPT_SECONDS,))


def _to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
