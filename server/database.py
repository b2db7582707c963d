"""The SQLite database of a server: opening it, its thread and transactions, and the bytes that a key may store."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..callers.errors import ConfigError, is_disk_full
from .config import ServerConfig
from .errors import HttpError

T = TypeVar("T")
_VACUUM_PAGES = 4096
_SIZED = ("files", "batches", "responses")  # tables whose rows have an owner and bytes
_VERSION = 3
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS pieces(file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY(file, number));
CREATE TABLE IF NOT EXISTS batches(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    created_at INTEGER NOT NULL, status TEXT NOT NULL, input TEXT NOT NULL,
    output TEXT NOT NULL, errors TEXT NOT NULL, kept_seconds INTEGER NOT NULL,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, fields TEXT NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS unfinished(batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL,
    PRIMARY KEY(batch, number));
CREATE TABLE IF NOT EXISTS responses(id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, created_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS unfinished_responses(id TEXT PRIMARY KEY);
CREATE INDEX IF NOT EXISTS sizes_of_responses ON responses(owner, bytes);
CREATE INDEX IF NOT EXISTS ages_of_responses ON responses(created_at);
"""
"""`pieces`: lines of uploaded files, and results of finished lines under the number of their input line, from the moment
they finish. `batches.output` and `batches.errors` are the ids that their files get when the batch ends, and `batches.bytes`
is the size of its results until then. `unfinished_responses`: responses in the background that are queued or in progress."""


class Database:
    """The database in the folder `data_dir`, which one server at a time may open. Owners are tenants of API keys.

    Methods of subclasses run in the thread of `call`; each is one transaction, so a killed process leaves either all or none of
    its changes.

    Args:
        clock: the time in seconds since 1970.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.time) -> None:
        assert config.data_dir is not None
        self._config, self._clock = config, clock
        folder = Path(config.data_dir)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "timeout": 1.0}
            path = folder / "batches.sqlite"
            path.touch(mode=0o600)  # the folder may be readable by others; files beside the database get its mode
            self._database = sqlite3.connect(path, **options)
            for pragma in ("locking_mode=EXCLUSIVE", "auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL"):
                self._database.execute(f"PRAGMA {pragma}")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in range(_VERSION + 1):
                raise OSError("it was written by another version of sensorium")
            if version == 1:
                column = "ALTER TABLE batches ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0"
                self._database.executescript(f"BEGIN; {column}; PRAGMA user_version={_VERSION}; COMMIT;")
            self._database.executescript(f"{_SCHEMA} PRAGMA user_version={_VERSION};")
        except (OSError, sqlite3.Error) as error:
            reason = f"<<param=>>{os.fspath(folder)} cannot be used: {error}; choose a folder that no other server uses"
            raise ConfigError(reason, param="data_dir") from None
        self._thread = ThreadPoolExecutor(1, "sensorium-store")

    async def call(self, method: Callable[..., T], *args: Any) -> T:
        """Run a method in the store's thread.

        Raises:
            HttpError: the database cannot be read or written, for instance because the disk is full.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, method, *args)
        except (sqlite3.Error, OSError) as error:
            if is_disk_full(error):
                reason = "the disk is full, so the folder of data_dir takes nothing more; free space on it, or try again later"
                raise HttpError(507, reason, "disk_full") from None
            if isinstance(error, OSError):
                raise
            reason = f"the folder of data_dir cannot be read or written ({error}); free some disk space and try again"
            raise HttpError(503, reason, "storage_failed") from None

    def close(self) -> None:
        self._thread.shutdown()
        self._database.close()

    @property
    def now(self) -> int:
        return int(self._clock())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.commit()
        except BaseException:
            self._database.rollback()
            raise

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._database.execute(sql, values).fetchall()
        return rows

    def _room(self, owner: str) -> int:
        """Return how many bytes an owner may still store."""
        used = " + ".join(f"(SELECT coalesce(sum(bytes), 0) FROM {table} WHERE owner = ?1)" for table in _SIZED)
        ((stored,),) = self._rows(f"SELECT {used}", owner)
        return max(0, self._config.max_stored_bytes - int(stored))

    def _full(self) -> HttpError:
        limit = f"{self._config.max_stored_bytes} bytes (max_stored_bytes)"
        reason = f"the files and responses of this key, with the results of its batches, would have more than {limit}"
        return HttpError(403, f"{reason}; delete those that are not needed any more", "storage_full", "file")

    def vacuum(self) -> bool:
        """Give some free pages of the database back to the disk. Return whether there are more."""
        self._rows(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        return bool(self._rows("PRAGMA freelist_count")[0][0])
