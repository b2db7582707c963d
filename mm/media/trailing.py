"""Recognise data after the end of a container that is not read: MP4 and MOV, Matroska and WebM, AVI, and Ogg."""

from __future__ import annotations

import io
import os
import re

_File = bytes | io.BufferedReader
_LEAST = 4096  # bytes; less may be padding, or a tag
_MOST_PARTS = 200_000  # boxes or segments that are looked at
_PIECE = 1 << 20  # bytes that are searched for the last page of an Ogg file at a time
_PAGE_HEADER = 27  # bytes of an Ogg page before its table (RFC 3533)
_BOX = re.compile(rb"[\x20-\x7e\xa9]{4}")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"  # elements of Matroska (RFC 9559)
_TOP_LEVEL = (_EBML, _SEGMENT, b"\xec", b"\xbf")  # also Void and CRC-32 (RFC 8794)
_ZEROS = 1 << 16  # bytes that are compared with padding


def unread_data(data: object) -> str | None:
    """Return what is said about data after the end that the container of a file (bytes or an open file) announces.

    None: there is none, or it is padding, or the format is another one.
    """
    if not isinstance(data, bytes | io.BufferedReader):
        return None
    size, head = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size, _part(data, 0, 12)
    if head[:4] == b"OggS":
        end = _ogg_end(data, size)
    elif head[:4] == _EBML:
        end = _matroska_end(data, size)
    elif head[:4] == b"RIFF" and head[8:] == b"AVI ":
        end = _avi_end(data, size)
    elif head[4:8] == b"ftyp":
        end = _mp4_end(data, size)
    else:
        return None
    if size - end < _LEAST or not _part(data, end, _ZEROS).strip(b"\0"):
        return None
    return f"{size - end:,} bytes after the end of its container have no known format; they are not read"


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)


def _ogg_end(data: _File, size: int) -> int:
    """Return where the last page ends."""
    for start in range(max(0, size - _PIECE), -_PIECE, -_PIECE):
        start = max(0, start)
        at = _part(data, start, _PIECE + 4).rfind(b"OggS\0")
        if at >= 0:
            head = _part(data, start + at, _PAGE_HEADER + 255)
            table = head[_PAGE_HEADER : _PAGE_HEADER + head[_PAGE_HEADER - 1]] if len(head) > _PAGE_HEADER else b""
            return start + at + _PAGE_HEADER + len(table) + sum(table)
    return size


def _matroska_end(data: _File, size: int) -> int:
    """Return where the last element ends that may stand outside of others."""
    at = 0
    for _ in range(_MOST_PARTS):
        head = _part(data, at, 12)
        name = next((name for name in _TOP_LEVEL if head.startswith(name)), None)
        if name is None or len(head) <= len(name):
            return at
        start = len(name)
        length = 9 - head[start].bit_length()  # of the number that follows, in bytes
        if length > 8:
            return at
        value = int.from_bytes(head[start : start + length], "big") & (1 << 7 * length) - 1
        if value == (1 << 7 * length) - 1:  # unknown: up to the end of the file
            return size
        at += start + length + value
    return size


def _avi_end(data: _File, size: int) -> int:
    """Return where the last list "RIFF" ends; a long file has several."""
    at = 0
    while (head := _part(data, at, 8))[:4] == b"RIFF" and len(head) == 8:
        length = int.from_bytes(head[4:], "little")
        if not length:  # a recording that was not ended: up to the end of the file
            return size
        at += 8 + length
    return at


def _mp4_end(data: _File, size: int) -> int:
    """Return where the last box ends that has a name and a size."""
    at = 0
    for _ in range(_MOST_PARTS):
        head = _part(data, at, 16)
        length = int.from_bytes(head[:4], "big")
        if len(head) < 8 or _BOX.match(head, 4) is None or (length < 8 and length > 1):
            return at
        if not length:  # up to the end of the file
            return size
        at += int.from_bytes(head[8:], "big") or 16 if length == 1 else length
        if at > size:
            return size
    return size
