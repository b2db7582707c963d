"""Stores encoder rows by the hash of their item: on the device until the scheduler frees them, and optionally on disk."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.files import open_regular
from ...kernels import bodies, native
from ...kernels.dispatch import active_backends
from ...mm.hashing import digest

QUEUE_BYTES = 256 << 20  # rows that may wait to be written to disk
_FORMAT = 2
_ROOT, _CODE = Path(__file__).parents[2], ("checkpoints", "kernels", "mm", "models", "processors")  # code that computes rows
_HASH = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{64}(\.\d{1,9})?")  # hash of an item, or of one piece of it
_MAX_HEADER = 4096  # bytes of a file beside its rows
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that died
_log = logging.getLogger(__name__)


@dataclass
class StoreStats:
    """Counts of file reads and writes since the start. `skipped`: rows not written because the write queue was full."""

    disk_hits: int = 0
    disk_misses: int = 0
    damaged: int = 0
    writes: int = 0
    skipped: int = 0
    failed: int = 0


class EncoderStore:
    """Encoder rows by hash and, with a `directory`, files of them that later processes can load.

    A file holds one item's rows as safetensors. It is named by the item's hash, which includes the tenant's salt, and lies in
    a folder named by everything else that rows depend on. Files are written in a thread and appear whole or not at all;
    several processes may share the directory. A failing disk costs a warning and an encoder call, never an error.

    Args:
        directory: created if needed; None for no files.
        capacity_bytes: maximum bytes of all files in the directory; the least recently used are deleted first.
        fingerprint: hash of the weights and their quantisation. The folder's name also depends on sensorium's code and the
            backend of every op.
        width, dtype: width and dtype of a row; files with another width or dtype count as damaged.

    Attributes:
        queue_bytes: bytes of rows that may wait to be written; further rows are not written.
    """

    queue_bytes = QUEUE_BYTES

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        capacity_bytes: int,
        fingerprint: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows: dict[str, Tensor] = {}  # hash -> [rows, width]
        self.dtype = dtype
        self.width, self._device = width, device
        self.stats = StoreStats()
        self._pending: dict[str, Tensor] = {}  # rows that wait to be written
        self._lock = threading.Lock()
        self._folder: _Folder | None = None
        if directory is not None:
            versions = (code_digest(_ROOT), active_backends(device, dtype), torch.__version__, _hardware(device))
            name = digest("sensorium.rows", _FORMAT, fingerprint, str(dtype), width, *versions)
            self._folder = _Folder(Path(directory), name, capacity_bytes)
            self._writer = ThreadPoolExecutor(1, "sensorium-encoder-store")

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def put(self, key: str, rows: Tensor, write: bool = True) -> None:
        """Keep `[n, width]` rows until `drop`. With `write`, rows of the store's width and dtype are written to disk later."""
        self.rows[key] = rows
        if self._folder is None or not write or not _KEY.fullmatch(key) or not self.fits(rows):
            return
        with self._lock:
            pending = sum(other.nbytes for other in self._pending.values())
            if key in self._pending:
                return
            if self._pending and pending + rows.nbytes > self.queue_bytes:
                self.stats.skipped += 1
                return
            self._pending[key] = rows
        self._writer.submit(self._write, key, rows, self._folder)

    def load(self, key: str, num_rows: int) -> Tensor | None:
        """Load `[num_rows, width]` from disk and keep them as `put` does; None if there is no valid file."""
        if self._folder is None or not _KEY.fullmatch(key):
            return None
        rows = self._pending.get(key)
        if rows is None:
            rows = self._read(key, num_rows, self._folder)
        is_whole = rows is not None and rows.shape[0] == num_rows
        self.stats.disk_hits += is_whole
        self.stats.disk_misses += not is_whole
        if rows is None or not is_whole:
            return None
        self.rows[key] = rows.to(self._device)
        return self.rows[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Drop rows from the device; files stay. Unknown keys are ignored."""
        for key in keys:
            self.rows.pop(key, None)

    def clear(self) -> None:
        """Drop all rows, once pending ones are written."""
        self.flush()
        self.rows.clear()

    def drop_folder(self) -> None:
        """Use no files from now on, once pending rows are written."""
        self.close()
        self._folder = None

    def flush(self) -> None:
        """Wait until pending rows are written."""
        if self._folder is not None:
            self._writer.submit(int).result()

    def close(self) -> None:
        """Write pending rows and end the thread. `put` must not be called afterwards."""
        if self._folder is not None:
            self._writer.shutdown()

    def fits(self, rows: Tensor) -> bool:
        """Return whether rows have the store's width and dtype."""
        return rows.ndim == 2 and rows.shape[1] == self.width and rows.dtype == self.dtype

    def _write(self, key: str, rows: Tensor, folder: _Folder) -> None:
        try:
            self.stats.writes += folder.write(key, _to_bytes(key, rows))
        except OSError as error:
            self.stats.failed += 1
            folder.warn(
                f"encoder rows cannot be written to {folder.path} ({error.strerror or error}); continuing without the disk"
            )
        finally:
            with self._lock:
                del self._pending[key]

    def _read(self, key: str, num_rows: int, folder: _Folder) -> Tensor | None:
        try:
            data = folder.read(key, num_rows * self.row_bytes + _MAX_HEADER)
            if data is None:
                return None
            rows = _from_bytes(key, data)
            if not self.fits(rows) or rows.shape[0] != num_rows:
                raise ValueError(f"it holds {rows.dtype} {list(rows.shape)} for {num_rows} rows of {self.width} {self.dtype}")
            return rows
        except OSError as error:
            folder.warn(
                f"encoder rows cannot be read from {folder.path} ({error.strerror or error}); continuing without the disk"
            )
        except (ValueError, KeyError, TypeError) as error:
            self.stats.damaged += 1
            _log.warning("deleted damaged encoder rows %s: %s", folder.file(key), error)
            folder.delete(folder.file(key))
        return None


class _Folder:
    """The files `<root>/<name>/<hash>.safetensors`. The capacity covers all files below the root, including other models'."""

    def __init__(self, root: Path, name: str, capacity: int) -> None:
        self.root, self.path, self.capacity = root, root / name, capacity
        self._allowance = 0  # bytes that may be written before the files are counted again
        self._warned = False

    def file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def warn(self, text: str) -> None:
        """Log a warning the first time only, because a full disk stays full for a while."""
        if not self._warned:
            _log.warning("%s", text)
        self._warned = True

    def read(self, key: str, limit: int) -> bytes | None:
        """Read a file and mark it as used; None if there is none. Raise ValueError if it is larger than `limit` bytes."""
        path = self.file(key)
        try:
            with open_regular(path) as file:
                self._check_owner()
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        self._touch(path)
        return data

    def write(self, key: str, data: bytes) -> bool:
        """Write a file. Return False, without writing, if it is larger than the capacity."""
        if len(data) > self.capacity:
            return False
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._check_owner()
        self._evict_for(len(data))
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=self.path)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, self.file(key))
        except BaseException:
            self.delete(Path(name))
            raise
        self._allowance -= len(data)
        return True

    def delete(self, path: Path) -> bool:
        """Delete a file. Return False if that fails; a file that is already gone counts as deleted."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _touch(self, path: Path) -> None:
        try:
            os.utime(path)
        except OSError:  # deleted meanwhile, or in a read-only folder; the bytes were read
            return

    def _check_owner(self) -> None:
        """Raise PermissionError if other users can write to the folder: their rows would be served as ours."""
        info = self.path.stat(follow_symlinks=False)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it belongs to another user or is open to others")

    def _evict_for(self, size: int) -> None:
        """Delete the least recently used files until `size` bytes fit.

        Files are counted again after half of the free space was written, so that two processes together respect the capacity.
        """
        if size <= self._allowance:
            return
        files = sorted(self._files())
        total = sum(length for _, length, _ in files)
        if total + size > self.capacity:
            target = min(self.capacity - size, self.capacity * 7 // 8)
            for _, length, path in files:
                if total <= target:
                    break
                total -= length if self.delete(path) else 0
        self._allowance = max(size, (self.capacity - total) // 2)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use, bytes, path) of every file. Temporary files of processes that died are deleted."""
        for folder in os.scandir(self.root):
            if not _HASH.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process deleted it
                    continue
                if entry.name.endswith(".safetensors"):
                    yield info.st_mtime, info.st_size, Path(entry)
                elif entry.name.endswith(".tmp") and time.time() - info.st_mtime > _STALE_SECONDS:
                    self.delete(Path(entry))


@functools.cache
def code_digest(root: Path) -> str:
    """Hash the code below `root` that computes rows, compiled kernels included."""
    files = (path for room in _CODE for path in (root / room).rglob("*") if path.suffix in (".py", ".so"))
    return digest("sensorium.code", {path.relative_to(root).as_posix(): path.read_bytes() for path in files})


def _hardware(device: torch.device) -> str:
    """Return the kind of processor: rows differ in their last bits between kinds."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} {native.instructions()} {' '.join(bodies.bodies_in_use())}"


def _to_bytes(key: str, rows: Tensor) -> bytes:
    from safetensors.torch import save

    rows = rows.detach().cpu().contiguous()
    return save({"rows": rows}, {"key": key, "sha256": _checksum(rows)})


def _from_bytes(key: str, data: bytes) -> Tensor:
    """Return the rows that `_to_bytes` packed for this key. Damaged bytes raise ValueError, KeyError or TypeError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        rows = load(data)["rows"]
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    if metadata["key"] != key or metadata["sha256"] != _checksum(rows):
        raise ValueError("its checksum or its key does not match")
    return rows


def _checksum(rows: Tensor) -> str:
    return hashlib.sha256(rows.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
