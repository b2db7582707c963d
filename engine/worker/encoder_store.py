"""Encoder rows by hash: on the device as long as the scheduler says, in a folder for longer. Knows no request and no model."""

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

from ..kernels.dispatch import active
from ..mm.hashing import digest

_FORMAT = 2
_ROOT, _MAKERS = Path(__file__).parents[1], ("kernels", "mm", "models", "processors")  # what is mended makes other rows
_HASH = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{64}(\.\d{1,9})?")  # of an item, or of one piece of it
_MAX_HEADER = 4096  # bytes of a file beside its rows
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that died
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreStats:
    """What the folder gave and took since the start. `skipped`: rows not written because too much waited to be."""

    disk_hits: int = 0
    disk_misses: int = 0
    damaged: int = 0
    writes: int = 0
    written_bytes: int = 0
    skipped: int = 0
    failed: int = 0


class EncoderStore:
    """A dict of rows and, with a `directory`, files of them that later processes find.

    A file holds one item's rows as safetensors, named by the item's hash (which has the tenant's salt in it), in a folder
    named by all that rows depend on beside the item. Files are written in a thread and appear whole or not at all; several
    processes may share the folder. Any trouble with it costs a warning and an encoder call, never an error.

    Args:
        directory: made if it is not there; None for no files.
        capacity_bytes: of all files in the directory; the least recently used go first.
        fingerprint: of the weights and their quantisation. What else rows depend on is known here: the code, as it lies on
            disk, and the backend of every op.
        width, dtype: of one row, as every file must have it.
        queue_bytes: rows that may wait to be written; more are not written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        capacity_bytes: int,
        fingerprint: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.rows: dict[str, Tensor] = {}  # hash -> [rows, width]
        self.dtype = dtype
        self._width, self._device, self._queue_bytes = width, device, queue_bytes
        self._counts = dict.fromkeys(StoreStats.__dataclass_fields__, 0)
        self._waiting: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self._folder: _Folder | None = None
        if directory is not None:
            made = (code_digest(_ROOT), active(device, dtype), torch.__version__, _hardware(device))
            name = digest("sensorium.rows", _FORMAT, fingerprint, str(dtype), width, *made)
            self._folder = _Folder(Path(directory), name, capacity_bytes)
            self._writer = ThreadPoolExecutor(1, "sensorium-encoder-store")

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    @property
    def row_bytes(self) -> int:
        return self._width * self.dtype.itemsize

    def get(self, key: str) -> Tensor | None:
        return self.rows.get(key)

    def put(self, key: str, rows: Tensor, keep: bool = True) -> None:
        """Hold `[n, width]` rows until `drop`; with `keep` a file of them is written later, unless they are of another kind."""
        self.rows[key] = rows
        if self._folder is None or not keep or not _KEY.fullmatch(key) or not self._fits(rows):
            return
        with self._lock:
            waiting = sum(other.nbytes for other in self._waiting.values())
            if key in self._waiting:
                return
            if self._waiting and waiting + rows.nbytes > self._queue_bytes:
                self._counts["skipped"] += 1
                return
            self._waiting[key] = rows
        self._writer.submit(self._write, key, rows, self._folder)

    def load(self, key: str, num_rows: int) -> Tensor | None:
        """`[num_rows, width]` from the folder, now held as by `put`; None if it has none that are whole and fit."""
        if self._folder is None or not _KEY.fullmatch(key):
            return None
        rows = self._waiting.get(key)
        if rows is None:
            rows = self._read(key, num_rows, self._folder)
        found = rows is not None and rows.shape[0] == num_rows
        self._counts["disk_hits" if found else "disk_misses"] += 1
        if rows is None or not found:
            return None
        self.rows[key] = rows.to(self._device)
        return self.rows[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget rows on the device; files stay. Unknown keys are ignored."""
        for key in keys:
            self.rows.pop(key, None)

    def clear(self) -> None:
        """Forget all rows once those that are to be written are."""
        self.flush()
        self.rows.clear()

    def flush(self) -> None:
        """Wait until everything put so far is written."""
        if self._folder is not None:
            self._writer.submit(int).result()

    def close(self) -> None:
        """Write what waits and end the thread; nothing may be put afterwards."""
        if self._folder is not None:
            self._writer.shutdown()

    @property
    def stats(self) -> StoreStats:
        return StoreStats(**self._counts)

    def _fits(self, rows: Tensor) -> bool:
        return rows.ndim == 2 and rows.shape[1] == self._width and rows.dtype == self.dtype

    def _write(self, key: str, rows: Tensor, folder: _Folder) -> None:
        try:
            size = folder.write(key, _to_bytes(key, rows))
            if size:
                self._counts["writes"] += 1
                self._counts["written_bytes"] += size
        except OSError as error:
            self._counts["failed"] += 1
            folder.complain(f"encoder rows cannot be written to {folder.path} ({error.strerror or error}); going on without")
        finally:
            with self._lock:
                del self._waiting[key]

    def _read(self, key: str, num_rows: int, folder: _Folder) -> Tensor | None:
        expected = num_rows * self._width * self.dtype.itemsize
        try:
            data = folder.read(key, expected + _MAX_HEADER)
            if data is None:
                return None
            rows = _from_bytes(key, data)
            if not self._fits(rows) or rows.shape[0] != num_rows:
                raise ValueError(f"it holds {rows.dtype} {list(rows.shape)} for {num_rows} rows of {self._width} {self.dtype}")
            return rows
        except OSError as error:
            folder.complain(f"encoder rows cannot be read from {folder.path} ({error.strerror or error}); going on without")
        except (ValueError, KeyError, TypeError) as error:
            self._counts["damaged"] += 1
            _log.warning("deleted damaged encoder rows %s: %s", folder.file(key), error)
            folder.delete(folder.file(key))
        return None


class _Folder:
    """Files `<root>/<name>/<hash>.safetensors`, and the cap of all that lie below the root, other models' too."""

    def __init__(self, root: Path, name: str, capacity: int) -> None:
        self.root, self.path, self.capacity = root, root / name, capacity
        self._allowance = 0  # bytes to write before the folder is looked at again
        self._complained = False

    def file(self, key: str) -> Path:
        return self.path / f"{key}.safetensors"

    def complain(self, text: str) -> None:
        """Once: a full disk stays full for a while."""
        if not self._complained:
            _log.warning("%s", text)
        self._complained = True

    def read(self, key: str, limit: int) -> bytes | None:
        """ValueError for a file above `limit` bytes; reading marks it as used."""
        path = self.file(key)
        try:
            with path.open("rb") as file:
                self._check_owner()
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        if len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        self._touch(path)
        return data

    def write(self, key: str, data: bytes) -> int:
        """Bytes written: 0 if they are more than the cap."""
        if len(data) > self.capacity:
            return 0
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._check_owner()
        self._make_room(len(data))
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=self.path)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, self.file(key))
        except BaseException:
            self.delete(Path(name))
            raise
        self._allowance -= len(data)
        return len(data)

    def delete(self, path: Path) -> bool:
        """False if it cannot be; that another process was first is as good as done."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _touch(self, path: Path) -> None:
        try:
            os.utime(path)
        except OSError:  # gone meanwhile, or a read-only folder: the bytes are here all the same
            return

    def _check_owner(self) -> None:
        """PermissionError where others may write: their rows would be served as ours."""
        info = self.path.stat(follow_symlinks=False)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it belongs to another user or is open to others")

    def _make_room(self, size: int) -> None:
        """Half of what is free may be written unseen, so that two processes together stay below the cap."""
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
        """(last use, bytes, path) of every file of ours; what processes that died left half written is deleted."""
        for folder in os.scandir(self.root):
            if not _HASH.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process was first
                    continue
                if entry.name.endswith(".safetensors"):
                    yield info.st_mtime, info.st_size, Path(entry)
                elif entry.name.endswith(".tmp") and time.time() - info.st_mtime > _STALE_SECONDS:
                    self.delete(Path(entry))


@functools.cache
def code_digest(root: Path) -> str:
    """Of the rooms below `root` that turn media into rows, compiled kernels too: a release number stands still meanwhile."""
    files = (path for room in _MAKERS for path in (root / room).rglob("*") if path.suffix in (".py", ".so"))
    return digest("sensorium.code", {path.relative_to(root).as_posix(): path.read_bytes() for path in files})


def _hardware(device: torch.device) -> str:
    """Rows differ in their last bits between kinds of processors."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _to_bytes(key: str, rows: Tensor) -> bytes:
    from safetensors.torch import save

    rows = rows.detach().cpu().contiguous()
    return save({"rows": rows}, {"key": key, "sha256": _checksum(rows)})


def _from_bytes(key: str, data: bytes) -> Tensor:
    """ValueError, KeyError or TypeError unless it is what `_to_bytes` made for this key."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        rows = load(data)["rows"]
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    if metadata["key"] != key or metadata["sha256"] != _checksum(rows):
        raise ValueError("its checksum or its name is another's")
    return rows


def _checksum(rows: Tensor) -> str:
    return hashlib.sha256(rows.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
