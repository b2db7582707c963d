"""Recognise audio files that end before their own headers say: WAV, AIFF, Ogg (Opus, Vorbis, ...), and MP3 with a length."""

from __future__ import annotations

import io
import os
import re
import struct

_File = bytes | io.BufferedReader
_CHUNKS = {b"RIFF": ("<I", b"data"), b"RIFX": (">I", b"data"), b"FORM": (">I", b"SSND")}  # byte order, chunk of the samples
_MAX_CHUNKS = 1000  # before that chunk
_OPEN_ENDED = 0x7FFF_0000  # bytes; a recorder that writes into a pipe announces more than this, or 0
_SLACK = 100  # bytes; some writers count their header as samples
_PAGE_HEADER, _LONGEST_PAGE = 27, 27 + 255 + 255 * 255  # bytes of an Ogg page (RFC 3533)
_LAST_PAGE = 4  # flag of an Ogg page
_XING_WITHIN = 1 << 12  # bytes after the tag of an mp3
_XING = re.compile(rb"\xff[\xe2-\xff].{11,36}?(?:Xing|Info)\0\0\0(.)(.{8})", re.DOTALL)
_HAS_FRAMES, _HAS_BYTES = 1, 2  # flags of "Xing"


def cut_off(data: object) -> str | None:
    """Return how an encoded audio file (bytes or an open file) is cut off, without decoding it; None if it is not.

    Samples and files of other formats are not checked. An Ogg file that ends after a whole page is cut off only if its last
    packet goes on in the next page: a recorder that was stopped leaves whole packets.
    """
    if not isinstance(data, bytes | io.BufferedReader):
        return None
    size = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size
    head = _part(data, 0, 12)
    if head[:4] == b"OggS":
        incomplete = _is_last_page_incomplete(_part(data, max(0, size - _LONGEST_PAGE), _LONGEST_PAGE))
        return "it is cut off (its last Ogg page or packet is incomplete); download or export it again" if incomplete else None
    announced = _chunk_end(data, *_CHUNKS[head[:4]]) if head[:4] in _CHUNKS else _mp3_end(data, head)
    if announced <= size + _SLACK:
        return None
    return f"it is cut off (it has {size:,} of {announced:,} bytes); download or export it again"


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)


def _chunk_end(data: _File, order: str, name: bytes) -> int:
    """Return where the chunk of the samples ends by its header; 0 if it is not found or the header gives no length."""
    at = 12
    for _ in range(_MAX_CHUNKS):
        head = _part(data, at, 8)
        if len(head) < 8:
            return 0
        length: int = struct.unpack_from(order, head, 4)[0]
        if head[:4] == name:
            return at + 8 + length if length < _OPEN_ENDED else 0
        at += 8 + length + length % 2
    return 0


def _mp3_end(data: _File, head: bytes) -> int:
    """Return where an mp3 ends by its first frame ("Xing" or "Info"); 0 if that has no length or the file is no mp3."""
    start = 0
    if head[:3] == b"ID3" and len(head) >= 10:
        start = 10 + sum((part & 127) << shift for part, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    header = _XING.search(_part(data, start, _XING_WITHIN))
    if header is None or not header[1][0] & _HAS_BYTES:
        return 0
    length: int = struct.unpack_from(">I", header[2], 4 if header[1][0] & _HAS_FRAMES else 0)[0]
    return start + header.start() + length if length else 0


def _is_last_page_incomplete(tail: bytes) -> bool:
    """Return whether the last page of an Ogg file is incomplete, or its last packet goes on in a page that is missing."""
    at = tail.rfind(b"OggS\0")
    if at < 0:  # something else follows the last page
        return False
    page = tail[at:]
    if len(page) < _PAGE_HEADER:
        return True
    lengths = page[_PAGE_HEADER : _PAGE_HEADER + page[_PAGE_HEADER - 1]]
    goes_on = lengths[-1:] == b"\xff" and not page[5] & _LAST_PAGE
    return goes_on or len(page) < _PAGE_HEADER + page[_PAGE_HEADER - 1] + sum(lengths)
