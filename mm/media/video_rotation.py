"""Rotation of a video track, read from the boxes of its container.

PyAV gives the rotation only of decoded frames. MP4 stores it in the track header's matrix (ISO/IEC 14496-12, 8.3.2), Matroska
in Projection/ProjectionPoseRoll (RFC 9559, 5.1.4.1.28.45); other containers have none.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence

_SEGMENT, _TRACKS, _TRACK, _VIDEO, _PROJECTION, _ROLL, _CLUSTER = (
    b"\x18\x53\x80\x67", b"\x16\x54\xae\x6b", b"\xae", b"\xe0", b"\x76\x70", b"\x76\x75", b"\x1f\x43\xb6\x75"
)  # fmt: skip
_MAX_BOXES = 10_000  # boxes read per level, which limits the time for a file full of empty boxes
_MAX_ALIKE = 100  # boxes of one kind that are opened per level
_Walk = Callable[[bytes, int, int, bytes], Iterator[tuple[int, int]]]


def quarter_turns(data: bytes, container: str, track: int, place: int) -> int:
    """Return the quarter turns counterclockwise (0-3) that make a track's frames upright; 0 for angles in between.

    Args:
        data: the file. container: FFmpeg's name of its format.
        track: the container's number of the track. place: its index among the video tracks.
    """
    if "mp4" in container:
        degrees = _mp4(data, track)
    elif "matroska" in container:
        degrees = _matroska(data, place)
    else:
        return 0
    turns = degrees / 90
    return round(turns) % 4 if math.isfinite(turns) and abs(turns - round(turns)) < 0.01 else 0


def _mp4(data: bytes, track: int) -> float:
    for header, end in _inside(_boxes, data, (b"moov", b"trak", b"tkhd")):
        wide = data[header : header + 1] == b"\x01"  # version 1 has 64-bit times
        matrix = header + (52 if wide else 40)
        if matrix + 36 <= end and struct.unpack_from(">I", data, header + (20 if wide else 12))[0] == track:
            a, b = struct.unpack_from(">2i", data, matrix)
            return -math.degrees(math.atan2(b, a))
    return 0.0


def _matroska(data: bytes, place: int) -> float:
    tracks = _inside(_elements, data, (_SEGMENT, _TRACKS, _TRACK, _VIDEO))
    for start, stop in _inside(_elements, data, (_PROJECTION, _ROLL), tracks[place]) if place < len(tracks) else ():
        if stop - start in (4, 8):
            return float(struct.unpack(">f" if stop - start == 4 else ">d", data[start:stop])[0])
    return 0.0


def _inside(walk: _Walk, data: bytes, path: Sequence[bytes], span: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """Return `(start, stop)` of the contents of all boxes at a path of kinds, within `span` or the whole file."""
    spans = [span or (0, len(data))]
    for kind in path:
        spans = [inner for outer in spans for inner in walk(data, *outer, kind)][:_MAX_ALIKE]
    return spans


def _boxes(data: bytes, start: int, stop: int, kind: bytes) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of the contents of the MP4 boxes of one kind."""
    for _ in range(_MAX_BOXES):
        if start + 8 > stop:
            return
        size, head = int.from_bytes(data[start : start + 4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        if 0 < size < head:
            return
        end = min(stop, start + size) if size else stop
        if data[start + 4 : start + 8] == kind:
            yield start + head, end
        start = end


def _elements(data: bytes, start: int, stop: int, kind: bytes) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of the contents of the EBML elements of one kind, up to the first cluster."""
    for _ in range(_MAX_BOXES):
        if start >= stop:
            return
        width = 9 - data[start].bit_length()
        name, start = data[start : start + width], start + width
        if width > 4 or start >= stop or name == _CLUSTER or not data[start]:
            return
        width = 9 - data[start].bit_length()
        unknown = (1 << 7 * width) - 1
        size, start = int.from_bytes(data[start : start + width], "big") & unknown, start + width
        end = stop if size == unknown else min(stop, start + size)
        if name == kind:
            yield start, end
        start = end
