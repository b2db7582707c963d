"""The records of pages in SQLite, and leases, so that several processes on one folder never read a page twice.

A page is a row: first waiting, then leased by a process, at last with its record. A process extends its leases while it lives;
the lease of one that was killed ends at once if it was of this machine, else after `LEASE_SECONDS`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from ...callers.errors import ConfigError, ErrorInfo, SensoriumError, is_disk_full
from .blocks import PageRecord
from .owner import has_ended, new_owner
from .stop import ReadingStopped

_log = logging.getLogger(__name__)
LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0
NAME = ".sensorium-read.sqlite"
"""Name of the manifest in the folder of the outputs."""
VERSION = 2
"""Version of the tables. A folder with another version is refused."""
MAX_DEATHS = 6
"""A page during which so many processes have ended is not read again. Some of them may have been killed for other reasons."""
_MAX_DEATHS_BESIDE_OTHERS = 2  # after so many, a process reads the page only while it reads no other page
_WAIT_SECONDS = 60.0  # for the lock of another process
_GIVE_BACK_SECONDS = 2.0  # the same, while a signal ends this process
_GIVE_BACK = "UPDATE pages SET owner=NULL, until=NULL WHERE owner=? AND record IS NULL"
_TABLES = """
CREATE TABLE IF NOT EXISTS pages (
    document TEXT NOT NULL, number INTEGER NOT NULL, owner TEXT, until REAL, attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0, record BLOB,
    PRIMARY KEY (document, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS waiting ON pages (document, attempts, number) WHERE record IS NULL;
"""
_DEADLY = ErrorInfo(
    "invalid_media", f"the process that read it has ended {MAX_DEATHS} times; divide the document, or leave the page out"
)
Ranges = tuple[tuple[int, int], ...]
"""First and last numbers of pages."""


class Manifest:
    """The records in a file, or in memory without a path. Thread-safe.

    Raises:
        ConfigError: the file is of another version, or is no manifest.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock, self._path = threading.RLock(), path
        self._gives_back = False  # a signal ends the process, which leases nothing more
        self.owner = new_owner()
        try:
            self._base = _connect(path)
            _use_wal(self._base)
            self._reads = self._base if path is None else _connect(path)
            self._base.execute("PRAGMA synchronous=NORMAL")
            with self._transaction():
                (version,) = self._base.execute("PRAGMA user_version").fetchone()
                if version not in (0, VERSION):
                    raise ConfigError(f"{path} was written by another version of sensorium; give another <<output_dir>>")
                for statement in _TABLES.split(";"):
                    self._base.execute(statement)
                self._base.execute(f"PRAGMA user_version={VERSION}")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} cannot be used ({error}); give another <<output_dir>>") from None
        self._end, self._lost = threading.Event(), ""  # `_lost`: why the leases have not been extended for their time
        self._beating = threading.Thread(target=self._beat, name="sensorium-leases", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Give all leases back, and close the file."""
        self._end.set()
        self._beating.join()
        with self._lock:
            try:
                with self._transaction():
                    self._base.execute(_GIVE_BACK, (self.owner,))
            finally:
                self._reads.close()
                self._base.close()

    def give_back(self) -> None:
        """Give all leases back from the handler of a signal, after which the process ends. Nothing is leased any more.

        Pages in work then count as interrupted, not as such that have ended their process. It does not wait for the lock of
        another thread, and rolls back a transaction of the code that the signal has interrupted.
        """
        if self._path is None:
            return
        self._gives_back = True
        if self._lock.acquire(blocking=False):  # it is free, or the interrupted code of this thread holds it
            if self._base.in_transaction:
                self._base.rollback()
            self._lock.release()
        with suppress(sqlite3.Error), closing(_connect(self._path, _GIVE_BACK_SECONDS)) as base:
            base.execute(_GIVE_BACK, (self.owner,))

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, document: str, ranges: Ranges) -> None:
        """Add the rows of pages that have none."""
        with self._transaction():
            for first, last in ranges:
                rows = ((document, number) for number in range(first, last + 1))
                self._base.executemany("INSERT OR IGNORE INTO pages (document, number) VALUES (?, ?)", rows)

    def claim(self, document: str, ranges: Ranges, most: int) -> list[int]:
        """Lease pages without a record, those that were begun least often first. Return their numbers.

        A page that was begun before is leased alone, because it may have ended the process that read it. After
        `_MAX_DEATHS_BESIDE_OTHERS` deaths, it is leased only if this process reads no other page. A page with which
        `MAX_DEATHS` processes have ended gets a record with an error.

        Raises:
            ReadingStopped: the leases were given back.
        """
        now, numbers, lost = time.time(), dict[int, int](), list[int]()  # `numbers`: with the deaths of each page
        self._check_leases()
        with self._transaction():
            if self._gives_back:
                raise ReadingStopped
            with closing(self._waiting("number, owner, until, attempts, deaths", document, ranges)) as rows:
                for number, owner, until, attempts, deaths in rows:
                    if numbers and attempts:
                        break
                    if not self._is_free(owner, until, now):
                        continue
                    deaths += owner is not None
                    if deaths >= MAX_DEATHS:
                        lost.append(number)
                    elif deaths < _MAX_DEATHS_BESIDE_OTHERS or not self._has_leases():
                        numbers[number] = deaths
                    if len(numbers) == (1 if attempts else most):
                        break
            for number, deaths in numbers.items():
                self._base.execute(
                    "UPDATE pages SET owner=?, until=?, attempts=attempts+1, deaths=? WHERE document=? AND number=?",
                    (self.owner, now + LEASE_SECONDS, deaths, document, number),
                )
            for number in lost:
                self._set_record(document, PageRecord(number, reason="it ends the process that reads it", error=_DEADLY))
        return sorted(numbers)

    def _has_leases(self) -> bool:
        return self._base.execute("SELECT 1 FROM pages WHERE owner=? AND record IS NULL", (self.owner,)).fetchone() is not None

    def _waiting(self, columns: str, document: str, ranges: Ranges) -> Generator[tuple[Any, ...], None, None]:
        """Yield columns, number first, of pages without a record, those that were begun least often first."""
        query = f"SELECT {columns} FROM pages WHERE document=? AND record IS NULL AND number BETWEEN ? AND ?"
        with closing(self._base.execute(f"{query} ORDER BY attempts, number", (document, *_ends(ranges)))) as rows:
            yield from (row for row in rows if _is_in(row[0], ranges))

    def can_claim(self, document: str, ranges: Ranges) -> bool:
        """Return whether `claim` would lease a page."""
        with self._lock:
            leases = {(owner, until) for _, owner, until in self._waiting("number, owner, until", document, ranges)}
        return any(self._is_free(owner, until, time.time()) for owner, until in leases)

    def _is_free(self, owner: str | None, until: float, now: float) -> bool:
        return owner is None or until < now or (owner != self.owner and has_ended(owner))

    def finish(self, document: str, records: Sequence[PageRecord]) -> None:
        """Write the records of leased pages. A page that another process has leased meanwhile keeps its own."""
        self._check_leases()
        with self._transaction():
            for record in records:
                self._set_record(document, record, "AND owner=?", self.owner)

    def _set_record(self, document: str, record: PageRecord, condition: str = "", *values: object) -> None:
        query = f"UPDATE pages SET record=?, owner=NULL, until=NULL WHERE document=? AND number=? {condition}"
        self._base.execute(query, (msgspec.json.encode(record), document, record.number, *values))

    def forget(self, document: str, ranges: Ranges, codes: Sequence[str]) -> None:
        """Make pages wait again whose error has one of these codes."""
        condition = "document=? AND number BETWEEN ? AND ? AND json_extract(CAST(record AS TEXT), '$.error.code') IN"
        query = f"SELECT number FROM pages WHERE {condition} ({', '.join('?' * len(codes))})"
        with self._transaction():
            rows = self._base.execute(query, (document, *_ends(ranges), *codes)).fetchall()
            values = ((document, number) for (number,) in rows if _is_in(number, ranges))
            self._base.executemany("UPDATE pages SET record=NULL WHERE document=? AND number=?", values)

    def missing(self, document: str, ranges: Ranges) -> int:
        """Return the number of pages without a record."""
        query = "SELECT number FROM pages WHERE document=? AND record IS NULL AND number BETWEEN ? AND ?"
        with self._lock, closing(self._reads.execute(query, (document, *_ends(ranges)))) as rows:
            return sum(_is_in(number, ranges) for (number,) in rows)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make `missing` and `records` tell of one moment, whatever other processes write meanwhile."""
        if self._reads is self._base:  # in memory: there are no other processes
            yield
            return
        self._reads.execute("BEGIN")
        try:
            yield
        finally:
            with suppress(sqlite3.ProgrammingError):  # it is closed
                self._reads.execute("COMMIT")

    def records(self, document: str, ranges: Ranges) -> Iterator[PageRecord]:
        """Yield the records of pages in their order, one at a time."""
        for first, last in ranges:
            for number in range(first, last + 1):
                with self._lock:
                    query = "SELECT record FROM pages WHERE document=? AND number=?"
                    (record,) = self._reads.execute(query, (document, number)).fetchone()
                yield msgspec.json.decode(record, type=PageRecord)

    def attempts(self) -> dict[tuple[str, int], int]:
        """Return how often each page was begun."""
        with self._lock:
            rows = self._base.execute("SELECT document, number, attempts FROM pages").fetchall()
        return {(document, number): attempts for document, number, attempts in rows}

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            try:
                self._base.execute("BEGIN IMMEDIATE")
                yield
                self._base.execute("COMMIT")
            except BaseException as error:
                if self._base.in_transaction:  # SQLite has ended it itself if the disk is full
                    self._base.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise _write_error(error) from None
                raise

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._end.wait(BEAT_SECONDS):
            try:
                with self._transaction():
                    until = time.time() + LEASE_SECONDS
                    self._base.execute("UPDATE pages SET until=? WHERE owner=? AND record IS NULL", (until, self.owner))
                last, self._lost = time.monotonic(), ""
            except Exception as error:
                _log.warning("the leases of pages were not extended, which is tried again: %s", error)
                self._lost = str(error) if time.monotonic() - last > LEASE_SECONDS else ""

    def _check_leases(self) -> None:
        if self._lost:
            reason = f"the leases of pages could not be extended for {LEASE_SECONDS:g} seconds: {self._lost}"
            raise ConfigError(f"{reason}; run it again with <<resume>>, or give another <<output_dir>>")


def _use_wal(base: sqlite3.Connection) -> None:
    """Switch to write-ahead logging. SQLite does not wait for a process that switches at the same time."""
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            base.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.05)


def _connect(path: Path | None, seconds: float = _WAIT_SECONDS) -> sqlite3.Connection:
    name = ":memory:" if path is None else str(path)
    return sqlite3.connect(name, seconds, isolation_level=None, check_same_thread=False)


def _write_error(error: sqlite3.Error) -> SensoriumError:
    """Return why the records cannot be written."""
    if is_disk_full(error):
        reason = "the disk is full, so the records of pages cannot be written"
        return ConfigError(f"{reason}; free some space and run it again with <<resume>>", code="disk_full")
    return ConfigError(f"the records of pages cannot be written ({error}); give another <<output_dir>>")


def _ends(ranges: Ranges) -> tuple[int, int]:
    """Return the first and the last number of ranges in order. SQLite takes at most a thousand conditions for the rest."""
    return ranges[0][0], ranges[-1][1]


def _is_in(number: int, ranges: Ranges) -> bool:
    index = bisect_right(ranges, number, key=lambda pair: pair[0]) - 1
    return index >= 0 and number <= ranges[index][1]
