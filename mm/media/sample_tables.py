"""Check of the sample tables of an MP4 or MOV before FFmpeg reads them.

FFmpeg makes an index entry of about 40 bytes for every sample that a table names, and does so again for every edit. A count
costs an attacker four bytes, so counts are compared with the bytes that are there (ISO/IEC 14496-12).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ...callers.errors import InputError

MOST_SAMPLES = 1 << 22  # of a track, times its edits: 39 hours at 30 frames a second
_MAX_BOXES = 200_000
_MAX_NESTED = 16
_MAX_TAGS = 4096  # boxes of tags
_PCM_SAMPLES = 1024  # samples of one tick each that FFmpeg puts into one index entry
_BRANCHES = b"moov trak mdia minf stbl edts dinf udta mvex moof traf tref wave meta ilst sinf schi gmhd iprp ipco ----"
_CONTAINERS = frozenset(_BRANCHES.split())
_ENTRY_BYTES = {b"stts": 8, b"ctts": 8, b"stsc": 12, b"stco": 4, b"co64": 8, b"stss": 4}
_NAMES = re.compile(rb"stsz|stz2|stts|ctts|stsc|stco|co64|trun|elst|cmov|trak|stbl")


@dataclass
class _Track:
    samples: int = 0
    size: int = 0  # of every sample; 0: the table has one for each
    edits: int = 1
    chunks: int = 0
    run: int = 0  # samples of the largest chunk
    ticks: bool = False  # every sample lasts one tick, as in PCM


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.boxes, self.fragments, self.tags = data, 0, 0, 0
        self.tracks = [_Track()]

    def box(self, start: int, stop: int, depth: int) -> None:
        """Check the boxes between two places."""
        while start + 8 <= stop:
            self.boxes += 1
            _check(self.boxes <= _MAX_BOXES and depth <= _MAX_NESTED, "it has too many boxes")
            size, head = int.from_bytes(self.data[start : start + 4], "big"), 8
            if size == 1:
                size, head = int.from_bytes(self.data[start + 8 : start + 16], "big"), 16
            size = size or stop - start
            if size < head:
                return
            kind, body, end = self.data[start + 4 : start + 8], start + head, min(stop, start + size)
            if kind == b"trak":
                self.tracks.append(_Track())
            if kind in _CONTAINERS or (kind in (b"free", b"hoov", b"skip") and self.data[body + 4 : body + 8] == b"moov"):
                before = self.boxes
                self.box(self.first_of_meta(body, end) if kind == b"meta" else body, end, depth + 1)
                self.tags += (self.boxes - before) * (kind == b"ilst")
                _check(self.tags <= _MAX_TAGS, "it has too many tags")
            else:
                self.table(kind, body, end)
            start += size

    def first_of_meta(self, body: int, end: int) -> int:
        """Return the start of the boxes in a meta box: FFmpeg looks for "hdlr" in steps of four bytes."""
        handler = self.data.find(b"hdlr", body, end)
        while handler >= 0 and (handler - body) % 4:
            handler = self.data.find(b"hdlr", handler + 1, end)
        return handler - 4 if handler > body else body + 4

    def table(self, kind: bytes, body: int, end: int) -> None:
        track, room = self.tracks[-1], end - body - 8
        first, count = (int.from_bytes(self.data[body + at : body + at + 4], "big") for at in (0, 4))
        if kind in _ENTRY_BYTES:
            _check(count * _ENTRY_BYTES[kind] <= room)
            if kind == b"stts":
                track.ticks = count == 1 and self.data[body + 12 : body + 16] == b"\0\0\0\1"
            elif kind == b"stsc":
                runs = struct.iter_unpack(">III", self.data[body + 8 : body + 8 + 12 * count])
                track.run = max((samples for _, samples, _ in runs), default=0)
            elif kind in (b"stco", b"co64"):
                track.chunks = max(track.chunks, count)
        elif kind in (b"stsz", b"stz2"):
            samples = int.from_bytes(self.data[body + 8 : body + 12], "big")
            bits = 32 if kind == b"stsz" else count & 0xFF
            track.size = count if kind == b"stsz" else 0
            _check(bool(track.size) or samples * bits <= 8 * (room - 4))
            track.samples = max(track.samples, samples)
        elif kind == b"elst":
            _check(count * (20 if first >> 24 else 12) <= room)
            track.edits = max(track.edits, count)
        elif kind == b"trun":
            _check(count * 4 * (first & 0xF00).bit_count() <= room)
            self.fragments += count
            _check(self.fragments <= min(MOST_SAMPLES, len(self.data)))
        elif kind == b"stsd":
            _check(_NAMES.search(self.data, body, end) is None)
        else:
            _check(kind != b"cmov", "its header is compressed")


def check_tables(data: bytes) -> None:
    """Raise InputError if the sample tables of an MP4 or MOV list more than the file holds. Other formats pass."""
    walk = _Walk(data)
    walk.box(0, len(data), 0)
    for track in walk.tracks:
        if track.size and track.ticks:
            entries = track.chunks * -(-track.run // _PCM_SAMPLES)
        else:
            _check(track.samples <= len(data))
            entries = track.samples
        _check(entries * track.edits <= MOST_SAMPLES)


def _check(holds: bool, reason: str = "its sample tables list more than the file holds") -> None:
    if not holds:
        raise InputError(f"{reason}; the file is broken or hostile")
