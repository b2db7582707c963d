"""A connector that keeps bytes in the files of a folder, which later processes and other machines can read."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ...checkpoints.files import open_regular

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # of file systems and systems without them


class DiskConnector:
    """The files `<root>/<key>.safetensors`. See `Connector`.

    Files appear whole or not at all, and a process that is killed leaves no part of one (on file systems that know unnamed
    files; on others, it is deleted after an hour). Several processes may share the folder. The capacity covers all files below
    the root, those of other models included; the least recently used are deleted first. Files of folders that other users can
    write to are not read.

    Args:
        writers: processes of an engine that write to the folder. Two such engines together respect the capacity.
    """

    name, is_in_process = "disk", False
    stale_seconds = 3600.0  # a temporary file this old belongs to a process that died

    def __init__(self, root: str | os.PathLike[str], capacity: int, writers: int = 1) -> None:
        self.root, self.capacity, self._writers = Path(root), capacity, writers
        self._allowance = 0  # bytes that may be written before the files are counted again
        self._lock = threading.Lock()

    def file(self, key: str) -> Path:
        return self.root / f"{key}.safetensors"

    def get(self, key: str, limit: int) -> bytes | None:
        path = self.file(key)
        try:
            with open_regular(path) as file:
                check_owner(path.parent)
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        with suppress(OSError):  # deleted meanwhile, or in a read-only folder; the bytes were read
            os.utime(path)
        return data

    def put(self, key: str, data: bytes) -> bool:
        if len(data) > self.capacity:
            return False
        path = self.file(key)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        check_owner(path.parent)
        with self._lock:
            self._make_room(len(data))
        try:
            handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o600)  # it has no name, and ends with the process
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
            _write_named(path, data)
        else:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                _name_file(handle, path)
        return True

    def contains(self, keys: Sequence[str]) -> set[str]:
        return {key for key in keys if self.file(key).is_file()}

    def delete(self, key: str) -> None:
        _delete(self.file(key))

    def describe(self) -> str:
        return f"the folder {self.root}"

    def close(self) -> None:
        """Do nothing: the files stay."""

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until `size` bytes fit.

        Files are counted again after half of this process's part of the free space was written, so that two engines together
        respect the capacity.
        """
        if size > self._allowance:
            self._allowance = max(size, (self.capacity - self._evict(size)) // (2 * self._writers))
        self._allowance -= size

    def _evict(self, size: int) -> int:
        """Count all files, delete the least recently used until `size` bytes fit, and return the bytes of those left."""
        files = sorted(self._files())
        total = sum(length for _, length, _ in files)
        if total + size > self.capacity:
            target = min(self.capacity - size, self.capacity * 7 // 8)
            for _, length, path in files:
                if total <= target:
                    break
                total -= length if _delete(path) else 0
        return total

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use, bytes, path) of every file. Temporary files of processes that died are deleted."""
        for folder in os.scandir(self.root):
            if not _NAMESPACE.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process deleted it
                    continue
                if entry.name.endswith(".safetensors"):
                    yield info.st_mtime, info.st_size, Path(entry)
                elif entry.name.endswith(".tmp") and time.time() - info.st_mtime >= self.stale_seconds:
                    _delete(Path(entry))


def _name_file(descriptor: int, path: Path) -> None:
    """Give an open file without a name its path, in place of a file that has it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        with suppress(FileExistsError):  # another process has written the same content meanwhile
            os.link(f"/proc/self/fd/{descriptor}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _write_named(path: Path, data: bytes) -> None:
    """Write a file under a temporary name first."""
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        _delete(Path(name))
        raise


def _delete(path: Path) -> bool:
    """Delete a file. Return False if that fails; a file that is already gone counts as deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def check_owner(folder: Path) -> None:
    """Raise PermissionError if other users can write to the folder: their bytes would be served as ours."""
    info = folder.stat(follow_symlinks=False)
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to another user or is open to others")
