"""Reads files of zip archives from untrusted bytes, in a codec worker, within limits."""

from __future__ import annotations

import io
import lzma
import stat
import zipfile
import zlib
from dataclasses import dataclass, field

from ...callers.errors import InputError

MAX_FILES = 20_000
_ENCRYPTED = 0x1  # flag of an entry
_BROKEN = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError)


@dataclass
class SafeZip:
    """The files of an archive by name. Nothing is written to disk, and no archive in the archive is opened.

    Args:
        data: bytes of the archive.
        limit: bytes that all files that are read may have together when they are unpacked.

    Raises:
        InputError: it is broken, has too many files, a name that leads out of its folder, two files of one name, a link, or
            an encrypted file.
    """

    data: bytes
    limit: int
    _files: dict[str, zipfile.ZipInfo] = field(default_factory=dict)
    _read: int = 0

    def __post_init__(self) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(self.data))
        except _BROKEN as error:
            raise InputError(f"the archive is broken ({error}); download or export it again") from None
        entries = self._zip.infolist()
        if len(entries) > MAX_FILES:
            reason = f"the archive has {len(entries):,} files, the limit is {MAX_FILES:,}"
            raise InputError(reason, code="over_limit", limit=MAX_FILES, value=len(entries))
        for entry in entries:
            if (fault := _fault_of(entry)) or entry.filename in self._files:
                raise InputError(f"the archive is not safe: the file {entry.filename[:80]!r} {fault or 'is there twice'}")
            self._files[entry.filename] = entry

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            InputError: there is no such file, it is broken, or the files are too large together.
        """
        if name not in self._files:
            raise InputError(f"the archive has no file {name[:80]!r}")
        left = self.limit - self._read
        try:
            with self._zip.open(self._files[name]) as file:
                data = file.read(left + 1)
        except _BROKEN as error:
            raise InputError(f"the file {name[:80]!r} of the archive is broken ({error})") from None
        self._read += len(data)
        if self._read > self.limit:
            reason = f"the files of the archive have more than {self.limit:,} bytes when they are unpacked"
            raise InputError(reason, code="over_limit", param="max_decoded_bytes", limit=self.limit)
        return data


def _fault_of(entry: zipfile.ZipInfo) -> str:
    """Return what is wrong with an entry, or ""."""
    name, mode = entry.filename, entry.external_attr >> 16
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        return "has a path that leads out of its folder"
    if stat.S_ISLNK(mode):
        return "is a link"
    return "is encrypted" if entry.flag_bits & _ENCRYPTED else ""
