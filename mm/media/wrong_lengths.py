"""Recognise MP3 and FLAC files whose header announces another length than the file has."""

from __future__ import annotations

import io
import os
import re
import struct

from .cut_off import cut_off
from .links import Steps
from .mp3_frames import read_frames, read_xing
from .policy import MediaPolicy
from .riff_sizes import Repaired

_File = bytes | io.BufferedReader
_TAIL = 1 << 18  # bytes at the end of a FLAC in which its last frame begins
_NEAR = 1 << 22  # samples after the announced ones that may be in this tail
_BLOCKS = (0, 192, 576, 1152, 2304, 4608, 0, 0, *(256 << i for i in range(8)))  # samples of a frame by code; 6, 7: stored
_STORED = {6: 1, 7: 2}  # bytes of a stored number of samples
_STORED_RATE = {12: 1, 13: 2, 14: 2}  # bytes of a stored rate


def with_right_length(data: _File, policy: MediaPolicy) -> Repaired | None:
    """Return the file without the wrong length in its header; None if that is right, or the MP3 ends too early.

    Samples of a FLAC and frames of an MP3 are counted. A difference of one frame is none.

    Raises:
        InputError: it takes longer than the policy allows.
    """
    head = _part(data, 0, 42)
    if head[:4] == b"fLaC":
        return _wrong_flac(data, head)
    xing = read_xing(data)
    if xing is None or xing.frames is None or cut_off(data) is not None:
        return None
    actual = sum(1 for _ in read_frames(data, xing.frame, Steps(policy).add)) - 1  # without that of the header
    if abs(actual - xing.frames) <= 1:
        return None
    return _repaired(data, xing.field, struct.pack(">I", actual), _text(xing.frames, actual, "frames"))


def _wrong_flac(data: _File, head: bytes) -> Repaired | None:
    announced = int.from_bytes(head[18:26], "big") & (1 << 36) - 1
    ends = _flac_ends(data, int.from_bytes(head[8:10], "big")) if announced and len(head) == 42 else []
    goes_on = any(announced < end <= announced + _NEAR for end, _ in ends)
    is_right = not ends or (any(announced == end for end, _ in ends) and not goes_on)
    if not is_right and announced > ends[-1][0] and not ends[-1][1]:
        return None  # it was cut off within a frame
    unknown = bytes((head[21] & 0xF0, 0, 0, 0, 0))
    return None if is_right else _repaired(data, 21, unknown, _text(announced, ends[-1][0], "samples"))


def _repaired(data: _File, at: int, field: bytes, reason: str) -> Repaired:
    return Repaired(data[:at] + field + data[at + len(field) :] if isinstance(data, bytes) else b"", reason)


def _text(announced: int, actual: int, unit: str) -> str:
    return f"its header announces {announced:,} {unit}, but {actual:,} are there; all are read"


def _flac_ends(data: _File, block: int) -> list[tuple[int, bool]]:
    """Return for each of the last frames of a FLAC the samples up to its end, and whether the file ends with it.

    Source: RFC 9639, section 9.

    A few may be wrong: what begins a frame, with its checksum, may also stand within one.

    `block`: samples of all frames but the last, if these do not vary.
    """
    size = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size
    tail = _part(data, max(0, size - _TAIL), _TAIL)
    starts = [match.start() for match in re.compile(rb"\xff[\xf8\xf9]").finditer(tail)]
    ends = [(end, start) for start in starts if (end := _flac_frame_end(tail[start : start + 16], block)) is not None]
    return [(end, number == len(ends) and _crc16(tail[start:]) == 0) for number, (end, start) in enumerate(ends, 1)]


def _flac_frame_end(head: bytes, block: int) -> int | None:
    """Return the samples up to the end of the frame with this header; None if the header's checksum is wrong."""
    if len(head) < 6 or head[3] & 1:  # the last frame may have few bytes
        return None
    first = head[4]
    length = 1 if first < 0x80 else 8 - (first ^ 0xFF).bit_length()  # of a number coded as in UTF-8
    if not (length == 1 and first < 0x80) and not 2 <= length <= 7:
        return None
    number = first if length == 1 else first & (0x7F >> length)
    for byte in head[5 : 4 + length]:
        number = number << 6 | byte & 0x3F
    at, code = 4 + length, head[2] >> 4
    count = int.from_bytes(head[at : at + _STORED[code]], "big") + 1 if code in _STORED else _BLOCKS[code]
    at += _STORED.get(code, 0) + _STORED_RATE.get(head[2] & 15, 0)
    if not count or at >= len(head) or _crc8(head[:at]) != head[at]:
        return None
    return (number if head[1] & 1 else number * block) + count


def _crc8(data: bytes) -> int:
    """Return the checksum with the polynomial x^8 + x^2 + x + 1."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value << 1 ^ 7) & 0xFF if value & 0x80 else value << 1
    return value


def _crc16(data: bytes) -> int:
    """Return the checksum with the polynomial x^16 + x^15 + x^2 + 1; 0 of a whole frame, which ends with its checksum."""
    value = 0
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1 ^ 0x8005) & 0xFFFF if value & 0x8000 else value << 1
    return value


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)
