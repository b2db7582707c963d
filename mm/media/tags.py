"""Files with many tags (titles, comments). FFmpeg compares each new tag with all before, so 60,000 of them take 20 seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MAX_BYTES = 1 << 16  # bytes of tags; FFmpeg reads so many in 0.1 s
_MAX_FRAMES = 2048
_FRAME = re.compile(rb"(?:T[A-Z0-9]{2,3}|COMM?|PRIV|ULT|USLT)\0")  # in an ID3v2 tag; a frame shorter than 16 MiB
_PART = 1 << 24  # bytes searched at a time, so that other threads run in between
_WITHOUT_TAGS = (b"GIF8", b"\xff", b"\0\0\1", b"\0\0\0\1")  # GIF; MP3 and AAC; MPEG program streams, raw H.264 and HEVC
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")  # of MP4 and MOV, whose tags `sample_tables` counts


def may_have_many_tags(data: bytes) -> bool:
    """Return whether a container may hold so many tags that reading its header takes long. Unknown containers may."""
    at = 0
    while data.startswith(b"ID3", at):
        size = sum((byte & 127) << 7 * offset for offset, byte in enumerate(reversed(data[at + 6 : at + 10])))
        if size > _MAX_BYTES and len(_FRAME.findall(data, at, at + size)) > _MAX_FRAMES:
            return True
        at += 10 + size
    if len(data) - at <= _MAX_BYTES or data.startswith(_WITHOUT_TAGS, at) or data[at + 4 : at + 8] in _BOXES:
        return False
    if data[at : at + 1] == data[at + 188 : at + 189] == b"G":  # an MPEG transport stream
        return False
    if data.startswith(b"\x1a\x45\xdf\xa3", at):
        return sum(_ebml_size(data, offset + 4) for offset in _places(data, b"\x12\x54\xc3\x67")) > _MAX_BYTES
    if data.startswith(b"RIFF", at):
        return sum(int.from_bytes(data[offset - 4 : offset], "little") for offset in _places(data, b"INFO")) > _MAX_BYTES
    return True


def _places(data: bytes, name: bytes) -> Iterator[int]:
    """Yield the positions of `name`."""
    for start in range(0, len(data), _PART):
        offset = data.find(name, start, start + _PART + len(name) - 1)
        while offset >= 0:
            yield offset
            offset = data.find(name, offset + 1, start + _PART + len(name) - 1)


def _ebml_size(data: bytes, at: int) -> int:
    """Return the size of a Matroska element (RFC 8794, 4). An unknown size is a large one."""
    length = 9 - data[at].bit_length() if at < len(data) else 9
    return int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
