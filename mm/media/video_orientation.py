"""Orientation of a video track, read from the boxes of its container.

PyAV gives it only for decoded frames. MP4 stores a matrix in the headers of the track and of the movie (ISO/IEC 14496-12, 8.2.2
and 8.3.2), Matroska the pose of a rectangular projection (RFC 9559, 5.1.4.1.28.41 and after); other containers have none.
Orientations are the numbers of EXIF, 1 to 8, as of images.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence

_SEGMENT, _TRACKS, _TRACK, _VIDEO, _PROJECTION, _CLUSTER = (
    b"\x18\x53\x80\x67", b"\x16\x54\xae\x6b", b"\xae", b"\xe0", b"\x76\x70", b"\x1f\x43\xb6\x75"
)  # fmt: skip
_TYPE, _YAW, _PITCH, _ROLL = b"\x76\x71", b"\x76\x73", b"\x76\x74", b"\x76\x75"
_MAX_BOXES = 10_000  # boxes read per level, which limits the time for a file full of empty boxes
_MAX_ALIKE = 100  # boxes of one kind that are opened per level
_TOLERANCE = 1.0  # degrees from a quarter turn, as in FFmpeg
_Walk = Callable[[bytes, int, int, bytes], Iterator[tuple[int, int]]]
_Matrix = tuple[float, float, float, float]
"""a, b, c, d: a pixel at (x, y) of a stored frame is shown at (a x + c y, b x + d y), shifted into the picture."""
_PLAIN: _Matrix = (1.0, 0.0, 0.0, 1.0)


def orientation_of_track(data: bytes, container: str, track: int, index: int) -> int:
    """Return the EXIF orientation of a track's frames: 2 to 8 for flips and quarter turns, else 1.

    Args:
        data: the file. container: FFmpeg's name of its format.
        track: the container's number of the track. place: its index among the video tracks.
    """
    if "mp4" in container:
        return orientation_of_matrix(_mp4(data, track))
    if "matroska" in container:
        return orientation_of_matrix(_matroska(data, index))
    return 1


def orientation_of_matrix(matrix: _Matrix) -> int:
    """Return the EXIF orientation that a display matrix means, by the rules of FFmpeg's autorotation; 1 for other angles."""
    a, b, c, d = matrix
    across, down = math.hypot(a, c), math.hypot(b, d)
    if not (across > 0 and down > 0):
        return 1
    degrees = math.degrees(math.atan2(b / down, a / across)) % 360
    turns = round(degrees / 90)
    if abs(degrees - 90 * turns) >= _TOLERANCE:
        return 1
    if turns % 2:
        return (5 if c > 0 else 6) if turns == 1 else (7 if c < 0 else 8)
    return (2 if d > 0 else 3) if turns == 2 else (4 if d < 0 else 1)


def _mp4(data: bytes, track: int) -> _Matrix:
    """Return the matrix of a track times that of the movie."""
    for header, end in _inside(_boxes, data, (b"moov", b"trak", b"tkhd")):
        wide = data[header : header + 1] == b"\x01"  # version 1 has 64-bit times
        offset = header + (52 if wide else 40)
        if offset + 36 <= end and struct.unpack_from(">I", data, header + (20 if wide else 12))[0] == track:
            break
    else:
        return _PLAIN
    matrix = _read_matrix(data, offset)
    for header, end in _inside(_boxes, data, (b"moov", b"mvhd"))[:1]:
        offset = header + (48 if data[header : header + 1] == b"\x01" else 36)
        if offset + 36 <= end:
            (a, b, c, d), (e, f, g, h) = matrix, _read_matrix(data, offset)
            return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h
    return matrix


def _read_matrix(data: bytes, offset: int) -> _Matrix:
    a, b, _, c, d = struct.unpack_from(">5i", data, offset)
    return a / 65536, b / 65536, c / 65536, d / 65536


def _matroska(data: bytes, index: int) -> _Matrix:
    """Return the matrix of a roll, after a flip if the yaw is half a turn. Other poses are not those of flat pictures."""
    tracks = _inside(_elements, data, (_SEGMENT, _TRACKS, _TRACK, _VIDEO))
    for projection in _inside(_elements, data, (_PROJECTION,), tracks[index]) if index < len(tracks) else ():
        kind = _inside(_elements, data, (_TYPE,), projection)
        yaw, pitch, roll = (_number(data, projection, name) for name in (_YAW, _PITCH, _ROLL))
        if any(any(data[start:stop]) for start, stop in kind) or pitch or abs(yaw) not in (0, 180) or not math.isfinite(roll):
            return _PLAIN
        cosine, sine = math.cos(math.radians(roll)), math.sin(math.radians(roll))  # a roll is counterclockwise
        return (-cosine, sine, sine, cosine) if yaw else (cosine, -sine, sine, cosine)
    return _PLAIN


def _number(data: bytes, span: tuple[int, int], kind: bytes) -> float:
    """Return the number of the first element of a kind, 0 if there is none."""
    for start, stop in _inside(_elements, data, (kind,), span):
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
