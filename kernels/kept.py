"""Records that are measured once per machine and kept as JSON files in the user's cache folder.

One process measures while the others wait, then read its file: processes that start at once use the same record. A file that is
broken, or that belongs to another machine or version, is measured anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_log = logging.getLogger(__name__)
_LARGEST = 1 << 20  # bytes of a file
_PATIENCE = 10.0  # seconds that a process waits for another one's record before it measures for itself


def cache_folder() -> Path:
    """Return the folder of these files, below XDG_CACHE_HOME, or ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "sensorium" / "kernels"


def record_path(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the file of the record of this kind and key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}-{name}.json"


def kept_record(kind: str, key: Mapping[str, Any], measure: Callable[[], Record], is_valid: Callable[[Record], bool]) -> Record:
    """Return the kept record, or measure and keep it. If the folder cannot be written, the record is of this process only.

    Args:
        key: everything that the record depends on, as JSON. Only a file with this key is read.
        is_valid: whether a record that was read has the values of one that `measure` returns; may raise as bad data does.
    """
    path, record = record_path(kind, key), None
    if (stored := _read(path, key, is_valid)) is not None:
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if (stored := _read(path, key, is_valid)) is not None:
                return stored
            record = measure()
            _write(path, {"key": key, "record": record})
    except OSError as error:
        _log.debug("%s is not kept: %s", path, error)
    return measure() if record is None else record


def _read(path: Path, key: Mapping[str, Any], is_valid: Callable[[Record], bool]) -> Record | None:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST))
        record = content["record"] if content["key"] == key else None
        return record if isinstance(record, dict) and is_valid(record) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process has at a time. Raises TimeoutError if another one keeps it."""
    end = time.monotonic() + _PATIENCE
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path} is locked") from None
                time.sleep(0.01)
        yield  # closing the file gives the lock back


def _write(path: Path, content: Record) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # a full disk
