"""Frames of MP3 files (MPEG audio, layer III), and the header "Xing" or "Info" that tells their number and bytes."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_File = bytes | io.BufferedReader
XING = rb"\xff[\xe2-\xff][\x10-\xef].{10,35}?(?:Xing|Info)\0\0\0([\0-\x0f])(.{8})"
_XING_WITHIN = 256  # bytes of a frame
_HAS_FRAMES, _HAS_BYTES = 1, 2  # flags of the header
_SMALLEST = 24  # bytes of a frame: MPEG-2 at 8 kbit/s and 24 kHz
_BIT_RATES = (  # kilobits of MPEG-2 and of MPEG-1
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_PIECE = 1 << 20  # bytes read at a time
_LOST = 1 << 16  # bytes searched for the next frame after a fault


@dataclass(frozen=True)
class XingHeader:
    """`frame`: where the first frame begins. `frames` and `bytes` that follow, or are in, the file; None: not announced.

    `field`: offset of what is announced first.
    """

    frame: int
    frames: int | None
    bytes: int | None
    field: int


def read_xing(data: _File, start: int = 0) -> XingHeader | None:
    """Return the header of the MP3 that begins at `start`, after its ID3 tag if it has one; None if it has no header."""
    head = _part(data, start, 10)
    frame = start + tag_size(head) if head[:3] == b"ID3" and len(head) == 10 else start
    match = re.compile(XING, re.DOTALL).match(_part(data, frame, _XING_WITHIN))
    if match is None:
        return None
    flags, at = match[1][0], 4 if match[1][0] & _HAS_FRAMES else 0
    frames = int.from_bytes(match[2][:4], "big") if flags & _HAS_FRAMES else None
    num_bytes = int.from_bytes(match[2][at : at + 4], "big") if flags & _HAS_BYTES else None
    if num_bytes is not None and num_bytes < _SMALLEST * (1 + (frames or 0)):  # so many frames are larger
        num_bytes = None
    return XingHeader(frame, frames, num_bytes, frame + match.start(2))


def tag_size(head: bytes) -> int:
    """Return the bytes of an ID3v2 tag by its first ten."""
    return 10 + sum((part & 127) << shift for part, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))


def frame_bytes(head: bytes) -> int:
    """Return the bytes of the frame with these first three or more bytes, 0 if they begin none of layer III."""
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2 or head[2] >> 4 in (0, 15) or head[2] & 12 == 12:
        return 0
    version = head[1] >> 3 & 3  # 3: MPEG-1, 2: MPEG-2, 0: MPEG-2.5
    rate = (44_100, 48_000, 32_000)[head[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}.get(version, 0)
    return (144 if version == 3 else 72) * 1000 * _BIT_RATES[version == 3][head[2] >> 4] // rate + (head[2] >> 1 & 1)


def read_frames(data: _File, start: int, step: Callable[[], object]) -> Iterator[tuple[int, int]]:
    """Yield where each frame begins and ends, the first of which begins at `start`. Up to 64 KiB between frames are skipped.

    `step` is called for each frame, and for each place that looks like one.
    """
    lengths: dict[bytes, int] = {}
    piece, begin, at = b"", 0, start
    while True:
        if not begin <= at <= begin + len(piece) - _LOST:
            piece, begin = _part(data, at, _PIECE), at
        head = piece[at - begin : at - begin + 3]
        length = lengths.get(head)
        if length is None:
            length = lengths[head] = frame_bytes(head)
        if not length:
            following = _next_frame(piece, at - begin, step)
            if following is None:
                return
            at = begin + following
            continue
        step()
        yield at, at + length
        at += length


def _next_frame(piece: bytes, at: int, step: Callable[[], object]) -> int | None:
    """Return where the next two frames in a row begin."""
    for match in re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]").finditer(piece, at + 1, at + _LOST):
        step()
        length = frame_bytes(piece[match.start() : match.start() + 3])
        if length and frame_bytes(piece[match.start() + length : match.start() + length + 3]):
            return match.start()
    return None


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)
