"""Files and batches in the database. A file is kept by lines, so that each line can be read alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from .errors import HttpError
from .response_store import KEPT_SECONDS, StoredResponses

MAX_LINES = 50_000
"""Most lines of an uploaded file, as in OpenAI's API."""
WINDOW_SECONDS = 24 * 3600
_ENDED = ("failed", "completed", "expired", "cancelled")
_MAX_ERRORS = 20
_MIB = 1 << 20
_FIELDS: tuple[str, ...] = ("errors", "output_file_id", "error_file_id", "metadata", "model", "usage")
_FIELDS += tuple(f"{status}_at" for status in ("in_progress", "finalizing", "cancelling", *_ENDED))
"""Fields of a batch that are null until they have a value."""


@dataclass
class CheckedLines:
    """The lines of a batch's input that were checked: numbers by custom_id, errors, and the last line."""

    ids: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    after: int = -1


class Store(StoredResponses):
    """Files, batches and responses."""

    # Files

    def add_file(
        self, owner: str, filename: str, lines: Iterable[bytes], kept_seconds: int, purpose: str = "batch"
    ) -> dict[str, Any]:
        """Store the lines of an uploaded file, or blocks of it if it is no file of requests, and return its object.

        Raises:
            HttpError: the owner has too many files or bytes.
        """
        self.remove_expired()
        self._check_count(owner, 1)
        room, size, file = self._room(owner), 0, f"file-{uuid4().hex}"
        with self._transaction():
            for number, line in enumerate(lines):
                size += len(line)
                if size > room:
                    raise self._full()
                self._database.execute("INSERT INTO pieces VALUES (?, ?, ?)", (file, number, line))
            self._insert_file(file, owner, filename, purpose, size, kept_seconds)
        return self.file(owner, file)

    def _check_count(self, owner: str, new: int) -> None:
        ((files,),) = self._rows("SELECT count(*) FROM files WHERE owner = ?", owner)
        ((running,),) = self._rows(f"SELECT count(*) FROM batches WHERE owner = ? AND status NOT IN {_ENDED}", owner)
        if files + 2 * running + new > self._config.max_files:
            reason = f"this key has {files} files and {running} batches in progress, which will have two files each"
            reason += f"; max_files is {self._config.max_files}; delete files that are not needed any more, or wait for batches"
            raise HttpError(403, reason, "storage_full")

    def _insert_file(self, file: str, owner: str, filename: str, purpose: str, size: int, kept_seconds: int) -> None:
        now = self.now
        values = (file, owner, filename, purpose, size, now, now + kept_seconds)
        columns = "id, owner, filename, purpose, bytes, created_at, expires_at"
        self._database.execute(f"INSERT INTO files({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def file(self, owner: str, file: str, param: str = "file_id") -> dict[str, Any]:
        """Return a file's object; HttpError if the owner has no such file."""
        columns = "id, filename, purpose, bytes, created_at, expires_at"
        rows = self._rows(f"SELECT {columns} FROM files WHERE id = ? AND owner = ? AND expires_at > ?", file, owner, self.now)
        if not rows:
            raise HttpError(404, f"there is no file {file!r} of this key; see /v1/files", "not_found", param)
        return _file_object(rows[0])

    def files(self, owner: str, after: str | None, limit: int, descending: bool, purpose: str | None) -> list[dict[str, Any]]:
        """Return up to `limit` + 1 files that follow the file `after`."""
        order, compare = ("DESC", "<") if descending else ("ASC", ">")
        start = self._position("files", owner, after, descending)
        sql = f"""SELECT id, filename, purpose, bytes, created_at, expires_at FROM files WHERE owner = ? AND expires_at > ?
            AND (? IS NULL OR purpose = ?) AND number {compare} ? ORDER BY number {order} LIMIT ?"""
        return [_file_object(row) for row in self._rows(sql, owner, self.now, purpose, purpose, start, limit + 1)]

    def _position(self, table: str, owner: str, after: str | None, descending: bool) -> int:
        if after is None:
            return 2**62 if descending else -1
        rows = self._rows(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", after, owner)
        if not rows:
            reason = f"after={after!r} is not an id of this key's {table}; give one from the list"
            raise HttpError(404, reason, "not_found", "after")
        return int(rows[0][0])

    def delete_file(self, owner: str, file: str) -> None:
        self.file(owner, file)
        used = self._rows(f"SELECT id FROM batches WHERE input = ? AND status NOT IN {_ENDED}", file)
        if used:
            reason = f"the batch {used[0][0]} reads this file; cancel it first, or wait until it ends"
            raise HttpError(409, reason, "file_in_use", "file_id")
        with self._transaction():
            self._remove(file)

    def _remove(self, file: str) -> None:
        self._database.execute("DELETE FROM files WHERE id = ?", (file,))
        self._database.execute("DELETE FROM pieces WHERE file = ?", (file,))

    def content(self, file: str, after: int) -> tuple[bytes, int]:
        """Return the lines after line `after`, up to about a mebibyte, and the number of the last one."""
        lines, size = list[bytes](), 0
        sql = "SELECT number, data FROM pieces WHERE file = ? AND number > ? ORDER BY number"
        for number, data in self._database.execute(sql, (file, after)):
            lines.append(data)
            after = number
            size += len(data)
            if size >= _MIB:
                break
        return b"".join(lines), after

    def remove_expired(self) -> None:
        """Remove files that have expired and batches that ended long ago."""
        now = self.now
        used = f"SELECT input FROM batches WHERE status NOT IN {_ENDED}"
        with self._transaction():
            for (file,) in self._rows(f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({used})", now):
                self._remove(file)
            self._remove_old_responses()
            oldest = now - KEPT_SECONDS - WINDOW_SECONDS
            self._database.execute(f"DELETE FROM batches WHERE status IN {_ENDED} AND created_at <= ?", (oldest,))

    # Batches

    def add_batch(self, owner: str, request: Mapping[str, Any], kept_seconds: int) -> dict[str, Any]:
        """Store a new batch, and return its object. `request`: the fields of OpenAI's request."""
        self.remove_expired()
        purpose = self.file(owner, request["input_file_id"])["purpose"]
        if purpose not in ("batch", "batch_output"):
            reason = f"the file has the purpose {purpose}; upload it with the purpose batch"
            raise HttpError(400, reason, "invalid_value", "input_file_id")
        self._check_count(owner, 2)
        if not self._room(owner):
            raise self._full()
        now, batch = self.now, f"batch_{uuid4().hex}"
        fields = {**request, "created_at": now, "expires_at": now + WINDOW_SECONDS}
        ids = (request["input_file_id"], f"file-{uuid4().hex}", f"file-{uuid4().hex}")
        columns = "id, owner, created_at, status, input, output, errors, kept_seconds, total, completed, failed, fields"
        values = (batch, owner, now, "validating", *ids, kept_seconds, 0, 0, 0, json.dumps(fields))
        with self._transaction():
            self._database.execute(f"INSERT INTO batches({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            ended = f"SELECT id FROM batches WHERE owner = ? AND status IN {_ENDED} ORDER BY number DESC LIMIT -1 OFFSET ?"
            self._database.execute(f"DELETE FROM batches WHERE id IN ({ended})", (owner, self._config.max_files))
        return self.batch(owner, batch)

    def batch(self, owner: str, batch: str) -> dict[str, Any]:
        """Return a batch's object; HttpError if the owner has no such batch."""
        sql = "SELECT id, status, total, completed, failed, fields FROM batches WHERE id = ? AND owner = ?"
        rows = self._rows(sql, batch, owner)
        if not rows:
            raise HttpError(404, f"there is no batch {batch!r} of this key; see /v1/batches", "not_found", "batch_id")
        return _batch_object(rows[0])

    def batches(self, owner: str, after: str | None, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` + 1 batches that are older than the batch `after`, the youngest first."""
        start = self._position("batches", owner, after, descending=True)
        sql = """SELECT id, status, total, completed, failed, fields FROM batches
            WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?"""
        return [_batch_object(row) for row in self._rows(sql, owner, start, limit + 1)]

    def cancel(self, owner: str, batch: str) -> dict[str, Any]:
        """Mark a batch as cancelling; HttpError if it has ended."""
        entry = self.batch(owner, batch)
        if entry["status"] in _ENDED:
            raise HttpError(409, f"the batch has ended ({entry['status']}) and cannot be cancelled", "batch_ended", "batch_id")
        if entry["status"] != "cancelling":
            with self._transaction():
                self._set_status(batch, "cancelling")
        return self.batch(owner, batch)

    def running(self) -> list[tuple[str, str]]:
        """Return (owner, id) of the batches that have not ended, the oldest first."""
        rows = self._rows(f"SELECT owner, id FROM batches WHERE status NOT IN {_ENDED} ORDER BY number")
        return [(owner, batch) for owner, batch in rows]

    def check_lines(self, batch: str, checked: CheckedLines, check: Callable[[bytes, Mapping[str, Any]], str]) -> bool:
        """Check about a mebibyte of a batch's input. Return whether there are more lines.

        Args:
            check: returns the custom_id of a line; raises HttpError if the line is wrong.
        """
        ((file, fields),) = self._rows("SELECT input, fields FROM batches WHERE id = ?", batch)
        request, size, ids, errors = json.loads(fields), 0, checked.ids, checked.errors
        sql = "SELECT number, data FROM pieces WHERE file = ? AND number > ? ORDER BY number"
        for number, line in self._database.execute(sql, (file, checked.after)):
            checked.after = number
            size += len(line)
            try:
                if line.strip():
                    custom_id = check(line, request)
                    if custom_id in ids:
                        reason = f"custom_id={custom_id!r} is in an earlier line, too; give each line its own"
                        raise HttpError(400, reason, "duplicate_custom_id", "custom_id")
                    ids[custom_id] = number
            except HttpError as error:
                errors.append({"code": error.code, "line": number + 1, "message": error.message, "param": error.param})
            if size >= _MIB or len(errors) == _MAX_ERRORS:
                return len(errors) < _MAX_ERRORS
        return False

    def start_batch(self, batch: str, checked: CheckedLines) -> bool:
        """Start a new batch whose lines were checked, or fail it. Return whether the batch may run."""
        ((status,),) = self._rows("SELECT status FROM batches WHERE id = ?", batch)
        if status != "validating":
            return bool(status == "in_progress")
        errors = checked.errors
        if not checked.ids and not errors:
            errors = [{"code": "empty_file", "line": None, "message": "the input file has no lines", "param": "input_file_id"}]
        with self._transaction():
            if errors:
                self._set_status(batch, "failed", errors={"object": "list", "data": errors})
            else:
                lines = [(batch, number, custom_id) for custom_id, number in checked.ids.items()]
                self._database.executemany("INSERT INTO unfinished VALUES (?, ?, ?)", lines)
                self._database.execute("UPDATE batches SET total = ? WHERE id = ?", (len(lines), batch))
                self._set_status(batch, "in_progress")
        return not errors

    def unfinished(self, batch: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Return (number, custom_id) of the next unfinished lines after line `after`."""
        sql = "SELECT number, custom_id FROM unfinished WHERE batch = ? AND number > ? ORDER BY number LIMIT ?"
        return [(number, custom_id) for number, custom_id in self._rows(sql, batch, after, limit)]

    def line_size(self, batch: str, number: int) -> int:
        """Return the bytes of a line of a batch's input."""
        sql = "SELECT length(data) FROM pieces JOIN batches ON file = input WHERE batches.id = ? AND pieces.number = ?"
        return int(self._rows(sql, batch, number)[0][0])

    def line(self, batch: str, number: int) -> bytes:
        """Return a line of a batch's input."""
        sql = "SELECT data FROM pieces JOIN batches ON file = input WHERE batches.id = ? AND pieces.number = ?"
        return bytes(self._rows(sql, batch, number)[0][0])

    def finish_line(self, batch: str, number: int, result: bytes, ok: bool, usage: Mapping[str, Any] | None = None) -> None:
        """Store the result of a line, unless the line has one or the batch has ended. End the batch if it has no room.

        `usage`: the line's tokens, which are added to those of the batch.
        """
        with self._transaction():
            sql = "DELETE FROM unfinished WHERE batch = ? AND number = ?"
            if self._database.execute(sql, (batch, number)).rowcount:
                kind = ("output", "completed") if ok else ("errors", "failed")
                if not self._add_results(batch, [(number, result)], *kind):
                    self._database.execute("UPDATE batches SET failed = failed + 1 WHERE id = ?", (batch,))
                    self._end(batch, "failed", None)
                elif usage is not None:
                    self._add_usage(batch, usage)

    def _add_usage(self, batch: str, usage: Mapping[str, Any]) -> None:
        ((fields,),) = self._rows("SELECT fields FROM batches WHERE id = ?", batch)
        values = json.loads(fields)
        values["usage"] = _sum(values.get("usage") or {}, usage)
        self._database.execute("UPDATE batches SET fields = ? WHERE id = ?", (json.dumps(values), batch))

    def _add_results(self, batch: str, results: Sequence[tuple[int, bytes]], file: str, count: str) -> bool:
        """Store results. Return False if there is no room for them."""
        ((owner, name),) = self._rows(f"SELECT owner, {file} FROM batches WHERE id = ?", batch)
        size = sum(len(result) for _, result in results)
        if size > self._room(owner):
            return False
        self._database.executemany("INSERT INTO pieces VALUES (?, ?, ?)", [(name, *result) for result in results])
        sql = f"UPDATE batches SET {count} = {count} + ?, bytes = bytes + ? WHERE id = ?"
        self._database.execute(sql, (len(results), size, batch))
        return True

    def end_batch(self, batch: str, status: str, result: Callable[[str], bytes]) -> None:
        """End a batch: lines without a result get `result(custom_id)` as an error, and its files become visible."""
        ((before,),) = self._rows("SELECT status FROM batches WHERE id = ?", batch)
        if before not in _ENDED:
            with self._transaction():
                self._end(batch, status, result)

    def _end(self, batch: str, status: str, result: Callable[[str], bytes] | None) -> None:
        """Do what `end_batch` says. Without room for the errors, or without `result`, the batch's own errors say so."""
        left, more = self._rows("SELECT number, custom_id FROM unfinished WHERE batch = ?", batch), dict[str, Any]()
        lines = [(number, result(custom_id)) for number, custom_id in left] if result else []
        if result is None or not self._add_results(batch, lines, "errors", "failed"):
            self._database.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(left), batch))
            full = self._full()
            error = {"code": full.code, "line": None, "message": full.message, "param": None}
            more["errors"] = {"object": "list", "data": [error]}
        self._database.execute("DELETE FROM unfinished WHERE batch = ?", (batch,))
        sql = "SELECT owner, output, errors, kept_seconds FROM batches WHERE id = ?"
        ((owner, output, errors, kept_seconds),) = self._rows(sql, batch)
        for field_name, kind, file in ("output_file_id", "output", output), ("error_file_id", "error", errors):
            ((size,),) = self._rows("SELECT sum(length(data)) FROM pieces WHERE file = ?", file)
            if size is not None:
                more[field_name] = file
                self._insert_file(file, owner, f"{batch}_{kind}.jsonl", "batch_output", size, kept_seconds)
        self._database.execute("UPDATE batches SET bytes = 0 WHERE id = ?", (batch,))
        finalizing = {"finalizing_at": self.now} if status == "completed" else {}
        self._set_status(batch, status, **more, **finalizing)

    def _set_status(self, batch: str, status: str, **more: Any) -> None:
        ((fields,),) = self._rows("SELECT fields FROM batches WHERE id = ?", batch)
        new = json.dumps({**json.loads(fields), f"{status}_at": self.now, **more})
        self._database.execute("UPDATE batches SET status = ?, fields = ? WHERE id = ?", (status, new, batch))


def _sum(total: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Add the numbers of two objects of the same shape; `total` may lack some."""
    return {
        name: _sum(total.get(name, {}), value) if isinstance(value, Mapping) else total.get(name, 0) + value
        for name, value in added.items()
    }


def _file_object(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("id", "filename", "purpose", "bytes", "created_at", "expires_at")
    return {"object": "file", "status": "processed", **dict(zip(names, row, strict=True))}


def _batch_object(row: tuple[Any, ...]) -> dict[str, Any]:
    batch, status, total, completed, failed, fields = row
    counts = {"total": total, "completed": completed, "failed": failed}
    return {
        "id": batch,
        "object": "batch",
        "status": status,
        "request_counts": counts,
        **dict.fromkeys(_FIELDS),
        **json.loads(fields),
    }
