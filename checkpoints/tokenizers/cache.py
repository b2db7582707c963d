"""Texts that take seconds to make, kept on disk for the next process of the same user."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...callers.errors import CheckpointError
from ..files import open_regular


def cached_text(name: str, key: str, make: Callable[[], str]) -> str:
    """Return the text that `make` returns, from the folder `name` of the user's cache if it is there under `key`.

    The cache is `$XDG_CACHE_HOME/sensorium`, by default `~/.cache/sensorium`. A file of another user, a file that others may
    write, and a file whose hash does not fit its key and content are replaced. If the cache is not writable, nothing is kept.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sensorium" / name
    path = folder / key
    text = _read(path, key)
    if text is None:
        text = make()
        with suppress(OSError):
            _write(path, key, text.encode("utf-8"))
    return text


def _checksum(key: str, content: bytes) -> bytes:
    """Return a hash of key and content, so that the file of another entry is not accepted under this key."""
    return hashlib.sha256(f"{key}\n".encode() + content).hexdigest().encode()


def _read(path: Path, key: str) -> str | None:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            checksum, _, content = file.read().partition(b"\n")
    except (OSError, CheckpointError):
        return None
    return content.decode("utf-8") if checksum == _checksum(key, content) else None


def _write(path: Path, key: str, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(key, content) + b"\n" + content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
