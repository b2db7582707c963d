"""Files of PCM with more samples than their header says: a recorder that crashed, or wrote into a pipe.

WAV, RF64, W64, AIFF, CAF and AU.
"""

from __future__ import annotations

import io
import os
import re
import struct
from dataclasses import dataclass

_File = bytes | io.BufferedReader
_MAX_CHUNKS = 1000
_NAME = re.compile(rb"[A-Za-z0-9 _\-.()\xa9]{4}")
_MIN_BYTES = 256  # bytes after the samples that are taken for samples
_LARGEST = 0xFFFF_FFFF  # size that a header of four bytes can announce
_PIECE = 1 << 20  # bytes compared at a time
_DS64_SAMPLES = 28  # offset in an RF64 at which its first chunk, "ds64", has the size of the samples (EBU Tech 3306)
_OPEN_ENDED = (-1, (1 << 64) - 1)  # announced bytes of samples up to the end of the file; libsndfile counts others
_IN_DS64 = 0xFFFF_FFFF  # the chunk of the samples refers to "ds64"


@dataclass(frozen=True)
class _Layout:
    """Chunks of a format: the first, the name of the samples', bytes of a name, the size, what it counts beside the content.

    Chunks begin at multiples of `aligned`.
    """

    first: int
    samples: bytes
    size: str
    name_bytes: int = 4
    counts_header: bool = False
    aligned: int = 2

    @property
    def header(self) -> int:
        """Bytes of a chunk's name and size."""
        return self.name_bytes + struct.calcsize(self.size)


_LAYOUTS = {
    b"RIFF": _Layout(12, b"data", "<I"),
    b"RF64": _Layout(12, b"data", "<I"),
    b"RIFX": _Layout(12, b"data", ">I"),
    b"FORM": _Layout(12, b"SSND", ">I"),
    b"caff": _Layout(8, b"data", ">q", aligned=1),
    b"riff": _Layout(40, b"data\xf3\xac\xd3\x11\x8c\xd1\0\xc0\x4f\x8e\xdb\x8a", "<Q", 16, True, 8),
}


@dataclass(frozen=True)
class _Samples:
    """Where samples begin, their announced bytes, and where and how the header stores these, `extra` larger."""

    start: int
    length: int
    field: int
    size: str
    extra: int = 0


@dataclass(frozen=True)
class Repaired:
    """A file whose header had a wrong length, with the right one.

    Args:
        data: the file with a header that counts all its samples, or with the largest size that the header can state; empty
            for an open file.
        reason: what was wrong; "" if the header left the size open.
    """

    data: bytes
    reason: str


def with_whole_size(data: _File) -> Repaired | None:
    """Return the file with the size of all its samples in the header; None if that is right, or larger than the file.

    Samples follow the announced ones if what is there is neither a chunk nor a tag, and not all zero.
    """
    layout = _LAYOUTS.get(_part(data, 0, 4))
    samples = _find(data, layout) if layout is not None else _find_in_au(data)
    if samples is None:
        return None
    size = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size
    is_open = samples.length in _OPEN_ENDED
    actual, end = size - samples.start, samples.start + (0 if is_open else samples.length)
    if end + _MIN_BYTES > size or _is_zero(data, end, size):
        return None
    if (
        layout is not None
        and not is_open
        and any(_is_chunk(data, at, layout, size) for at in (end, end + -end % layout.aligned))
    ):
        return None
    if _part(data, end, 8).startswith((b"TAG", b"ID3", b"APETAGEX", b".snd", *_LAYOUTS)):
        return None
    fixed = b""
    if isinstance(data, bytes):
        largest = _LARGEST if struct.calcsize(samples.size) == 4 else _LARGEST << 16
        field = struct.pack(samples.size, min(actual + samples.extra, largest))
        fixed = data[: samples.field] + field + data[samples.field + len(field) :]
    text = f"its header announces {samples.length:,} bytes of samples, but {actual:,} are there; all are read"
    return Repaired(fixed, "" if is_open else text)


def _find(data: _File, layout: _Layout) -> _Samples | None:
    """Return where the samples are; None if there is no chunk of them, or it is open-ended."""
    at = layout.first
    for _ in range(_MAX_CHUNKS):
        name, length = _chunk(data, at, layout)
        if length is None:
            return None
        start = at + layout.header
        if name == layout.samples:
            field, size = at + layout.name_bytes, layout.size
            if length == _IN_DS64 and _part(data, 0, 4) == b"RF64":
                field, size = _DS64_SAMPLES, "<Q"
                (length,) = struct.unpack(size, _part(data, field, 8))
            length = length if length in _OPEN_ENDED else max(0, length)
            return _Samples(start, length, field, size, layout.header * layout.counts_header)
        if length < 0:
            return None
        at = start + length
        at += -at % layout.aligned
    return None


def _find_in_au(data: _File) -> _Samples | None:
    """Return where the samples of an AU are, which has no chunks; None for other files, and if it announces no size."""
    head = _part(data, 0, 12)
    if head[:4] != b".snd" or len(head) < 12:
        return None
    start, length = struct.unpack_from(">II", head, 4)
    return None if length == 0xFFFF_FFFF else _Samples(start, length, 8, ">I")


def _chunk(data: _File, at: int, layout: _Layout) -> tuple[bytes, int | None]:
    """Return the name of a chunk and the bytes of its content, None if the file ends there."""
    head = _part(data, at, layout.header)
    if len(head) < layout.header:
        return b"", None
    (length,) = struct.unpack_from(layout.size, head, layout.name_bytes)
    return head[: layout.name_bytes], length - layout.header * layout.counts_header


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)


def _is_zero(data: _File, start: int, size: int) -> bool:
    """Return whether all bytes from `start` on are zero, as padding is."""
    parts = (_part(data, at, min(_PIECE, size - at)) for at in range(start, size, _PIECE))
    return all(part == bytes(len(part)) for part in parts)


def _is_chunk(data: _File, at: int, layout: _Layout, size: int) -> bool:
    name, length = _chunk(data, at, layout)
    return length is not None and _NAME.match(name) is not None and 0 <= length <= size + 1 - at - layout.header
