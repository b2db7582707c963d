"""A connector that keeps bytes in named shared memory of this machine, which other engines can read."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from .disk import DiskConnector, check_owner

ROOT = Path("/dev/shm")  # a file system in memory
_USERS, _WRITER = "users", "writer"  # files whose locks say who uses the memory, and who writes to it
_LOCK_SECONDS = 2.0  # an engine that holds a lock for longer is stopped
_POLL_SECONDS = 0.002
_COUNT_BYTES = 8  # of the number in the file of the writer


class SharedMemoryConnector(DiskConnector):
    """Keeps files in /dev/shm/sensorium-<user>-<name>. See `Connector` and `DiskConnector`.

    All engines of a user that give the same name share the memory. Each of them holds a lock while it runs, which the kernel
    releases when the engine dies. The last engine that closes its connector deletes the memory. If it was killed, the next
    engine with a connector of this class does so, whatever the name.

    One engine writes at a time, so that all together stay within the capacity. An engine with a smaller one drops more.

    Raises:
        OSError: there is no such file system here, or the folder belongs to another user.
    """

    name = "shared_memory"
    stale_seconds = 0.0  # temporary files are counted by the only writer; those that it finds belong to engines that died

    def __init__(self, name: str, capacity: int) -> None:
        for folder in ROOT.glob(f"sensorium-{os.geteuid()}-*"):
            _delete_unused(folder)
        super().__init__(ROOT / f"sensorium-{os.geteuid()}-{name}", capacity)
        users = _join(self.root)
        self._writer = _open(self.root / _WRITER)
        self._putting = threading.Lock()  # `close` waits for it
        # also run when the process ends without `close`
        self._leave = weakref.finalize(self, _leave, self.root, users, self._writer, self._putting)

    def put(self, key: str, data: bytes) -> bool:
        with self._putting:
            if self._writer.closed:
                return False
            with _locked(self._writer):
                return super().put(key, data)

    def describe(self) -> str:
        return f"the shared memory {self.root}"

    def close(self) -> None:
        """Delete the memory if no other engine uses it."""
        self._leave()

    def _make_room(self, size: int) -> None:
        """Drop the least recently used files until `size` bytes fit.

        The number that all writers share is never below the bytes of all files: it grows before a file is written, and files
        are counted again when they seem to exceed the capacity.
        """
        file = self._writer.fileno()
        total = int.from_bytes(os.pread(file, _COUNT_BYTES, 0), "little")
        if total + size > self.capacity:
            total = self._evict(size)
        os.pwrite(file, (total + size).to_bytes(_COUNT_BYTES, "little"), 0)


def _join(folder: Path) -> FileIO:
    """Make a folder of shared memory unless it exists, and return its file of users, locked."""
    limit = time.monotonic() + _LOCK_SECONDS
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        check_owner(folder)
        with suppress(FileNotFoundError):  # the last user has just deleted the folder
            users = _open(folder / _USERS)
            try:
                _lock(users, fcntl.LOCK_SH, limit)
                if os.path.samestat(os.fstat(users.fileno()), os.stat(folder / _USERS)):
                    return users
            except BaseException:
                users.close()
                raise
            users.close()


def _leave(folder: Path, users: FileIO, writer: FileIO, putting: threading.Lock) -> None:
    with putting:
        writer.close()
        _delete_unlocked(folder, users)


def _delete_unused(folder: Path) -> None:
    """Delete a folder of shared memory that no engine uses."""
    with suppress(OSError):
        check_owner(folder)
        _delete_unlocked(folder, _open(folder / _USERS))


def _delete_unlocked(folder: Path, users: FileIO) -> None:
    """Delete a folder if nobody else has locked its file of users. Close the file."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            elif entry.name != _USERS:
                os.unlink(entry)
        os.unlink(folder / _USERS)  # last, so that a deletion that was interrupted is resumed
        folder.rmdir()  # fails if another engine has just made its own file of users
    except OSError:
        pass
    finally:
        users.close()


def _open(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+")


def _lock(file: FileIO, kind: int, limit: float) -> None:
    """Lock a file. Raise TimeoutError if another process still holds it at the time `limit`."""
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise TimeoutError("another engine has locked it, and does not answer") from None
            time.sleep(_POLL_SECONDS)
        else:
            return


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    _lock(file, fcntl.LOCK_EX, time.monotonic() + _LOCK_SECONDS)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
