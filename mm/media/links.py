"""Find the links of a chain: complete files of one format that follow each other in one file.

A radio stream that was recorded, or files joined with `cat`, are chains. Decoders stop after the first link, so each link is
decoded as a file. In an Ogg file, links begin where streams begin after others have ended (RFC 3533, section 4); pages are also
checked for holes in time, which libsndfile ignores.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from ...callers.errors import InputError
from .mp3_frames import XING, frame_bytes, read_frames, read_xing, tag_size
from .policy import DecodeClock, MediaPolicy

_File = bytes | io.BufferedReader
MOST_LINKS = MOST_STREAMS = 4096
MOST_BOXES = 200_000
_CHECKED_EVERY = 1000  # pages, boxes or matches between two looks at the clock
_PIECE = 1 << 20  # bytes searched at a time, so that other threads run in between
_OVERLAP = 256  # bytes of a pattern at most
_STARTS = {  # first bytes of a file -> what begins each link
    b"RIFF": rb"RIFF....WAVE(?:fmt |JUNK|junk|bext|LIST|fact)",
    b"RIFX": rb"RIFX....WAVEfmt ",
    b"FORM": rb"FORM....AIF[FC](?:COMM|FVER|MARK|NAME|COMT)",
    b"fLaC": rb"fLaC\0\0\0\x22",
    b"#!AM": rb"#!AMR(?:-WB)?\n",
    b"FLV\x01": rb"FLV\x01[\1\4\5]\0\0\0\x09\0\0\0\0",
    b"\x1a\x45\xdf\xa3": rb"\x1a\x45\xdf\xa3[\1-\xff].{0,64}?(?:webm|matroska)",
    b"caff": rb"caff\0\x01\0\0desc\0\0\0\0\0\0\0\x20",
    b"RF64": rb"RF64....WAVEds64",
    b"riff": rb"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0.{8}wave\xf3\xac\xd3\x11\x8c\xd1\0\xc0\x4f\x8e\xdb\x8a",  # W64
    b"TTA1": rb"TTA1[\1-\3]\0[\1-\xff]\0[\1-\x20]\0",
    b"Crea": rb"Creative Voice File\x1a",
    b".snd": rb"\.snd\0.{7}\0\0\0[\1-\x1b]\0..{2}\0\0\0[\1-\x08]",
    b"wvpk": rb"wvpk.{4}[\2-\x10]\x04.{6}\0\0\0\0.{5}"
    rb"[\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f\x48-\x4f\x58-\x5f\x68-\x6f\x78-\x7f]",
    b"nut/": rb"nut/multimedia container\0",
    b"\x30\x26\xb2\x75": rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\0\xaa\0\x62\xce\x6c",
}
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"moof", b"sidx", b"styp", b"uuid", b"meta")
_ID3 = re.compile(rb"ID3[\2-\4]\0.[\0-\x7f]{4}", re.DOTALL)
_ID3_WITHIN = 1 << 22  # bytes before the first frame of a link in which its tag is searched
_PAGE_HEADER = 27  # bytes of an Ogg page before its table
_NO_GRANULE = (1 << 64) - 1
_CONTINUED, _FIRST = 1, 2  # flags of an Ogg page
_HOLE = 0.1  # seconds
_OPUS_FRAMES = (480, 960, 1920, 2880) * 3 + (480, 960) * 2 + (120, 240, 480, 960) * 4  # samples at 48 kHz, by configuration


@dataclass(frozen=True)
class Links:
    """`starts`: offsets at which links begin, the first is 0.

    `has_holes`: packets are missing in an Ogg stream, or something else is between the frames of an MP3. libsndfile ignores the
    first and stops at the second.
    """

    starts: tuple[int, ...] = (0,)
    has_holes: bool = False


def read_links(data: _File, policy: MediaPolicy) -> Links:
    """Return the links of encoded bytes or of an open file. Other formats have one.

    Raises:
        InputError: there are more than MOST_LINKS, MOST_STREAMS or MOST_BOXES, or it takes longer than the policy allows.
    """
    head, steps = _part(data, 0, 12), Steps(policy)
    if head[:4] == b"OggS":
        return _Pages(data, steps).read()
    starts: Iterator[int] = iter((0,))
    if head[:4] in _STARTS:
        starts = chain(starts, (at for at, _ in _matches(data, _STARTS[head[:4]], 4, steps)))
    elif head[4:8] in _BOXES:
        starts = _box_links(data, steps)
    elif head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] >= b"\xe0"):
        mp3_starts = tuple(_limited(_mp3_links(data, steps)))
        return Links(mp3_starts, _mp3_has_holes(data, mp3_starts, steps))
    return Links(tuple(_limited(starts)))


def _limited(starts: Iterator[int]) -> Iterator[int]:
    """Yield the starts of links.

    Raises:
        InputError: there are more than MOST_LINKS. The rest of the file is not searched then.
    """
    for number, start in enumerate(starts):
        if number == MOST_LINKS:
            raise InputError(f"it is a chain of more than {MOST_LINKS:,} files; split it", code="over_limit", limit=MOST_LINKS)
        yield start


def _part(data: _File, start: int, count: int) -> bytes:
    return data[start : start + count] if isinstance(data, bytes) else os.pread(data.fileno(), count, start)


def _size(data: _File) -> int:
    return len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size


class Steps:
    """Limits the time in which a file is searched. It looks at the clock once in many steps."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._clock, self._count = DecodeClock(policy), 0

    def add(self, count: int = 1) -> None:
        """Count a step, or one that takes as long as `count` steps.

        Raises:
            InputError: the search has taken longer than the policy allows.
        """
        self._count += count
        if self._count >= _CHECKED_EVERY:
            self._count = 0
            self._clock.check()


def _matches(data: _File, pattern: bytes, start: int, steps: Steps) -> Iterator[tuple[int, re.Match[bytes]]]:
    """Yield the matches of a pattern and their offsets."""
    expression, last, size = re.compile(pattern, re.DOTALL), start - 1, _size(data)
    for piece in range(start, size, _PIECE):
        steps.add(_CHECKED_EVERY)
        is_bytes, stop = isinstance(data, bytes), min(size, piece + _PIECE + _OVERLAP)
        part = data if isinstance(data, bytes) else _part(data, piece, stop - piece)
        for match in expression.finditer(part, *((piece, stop) if is_bytes else ())):
            steps.add()
            at = match.start() + (0 if is_bytes else piece)
            if at > last:
                last = at
                yield at, match


def _box_links(data: _File, steps: Steps) -> Iterator[int]:
    """Yield where an MP4 begins: at 0, and at every `ftyp` after a `moov`.

    Raises:
        InputError: there are more than MOST_BOXES.
    """
    at, size, has_index = 0, _size(data), False
    yield 0
    for number in count():
        if at + 8 > size:
            return
        if number == MOST_BOXES:
            raise InputError(
                f"it has more than {MOST_BOXES:,} boxes; save it again without fragments, or split it",
                code="over_limit",
                limit=MOST_BOXES,
            )
        steps.add()
        head = _part(data, at, 16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if head[4:8] == b"ftyp" and has_index:
            yield at
            has_index = False
        has_index = has_index or head[4:8] == b"moov"
        if length < 8:
            return
        at += length


def _mp3_links(data: _File, steps: Steps) -> Iterator[int]:
    """Yield where an MP3 begins: at 0, where the length in the header before ends, and at every later header with a length."""
    yield 0
    size, last = _size(data), 0
    for frame in chain((at for at, _ in _matches(data, XING, 0, steps)), (size,)):
        start = size if frame == size else _with_tag(data, frame, last, steps)
        end = _end_by_header(data, last, size, steps)
        if end is not None and last < end < start and _goes_on(data, end):
            last = end
            yield end
        if start < size and start > last:
            last = start
            yield start


def _mp3_has_holes(data: _File, starts: Sequence[int], steps: Steps) -> bool:
    """Return whether a link that begins with a header has other data between its frames."""
    for start, stop in zip(starts, (*starts[1:], _size(data)), strict=True):
        xing = read_xing(data, start)
        if xing is None:
            continue
        last = xing.frame
        for begin, end in read_frames(data, last, steps.add):
            if begin >= stop:
                break
            if begin != last:
                return True
            last = end
    return False


def _with_tag(data: _File, frame: int, after: int, steps: Steps) -> int:
    """Return where the ID3 tag before a frame begins, or the frame's own place."""
    begin = max(after, frame - _ID3_WITHIN)
    before = _part(data, begin, frame - begin)
    for match in _ID3.finditer(before):
        steps.add()
        if begin + match.start() + tag_size(match[0]) == frame:
            return begin + match.start()
    return frame


def _end_by_header(data: _File, start: int, size: int, steps: Steps) -> int | None:
    """Return where an MP3 ends by its first frame, None if that does not tell."""
    xing = read_xing(data, start)
    if xing is None or (xing.bytes is None and not xing.frames):
        return None
    if xing.bytes is not None:
        end = xing.frame + xing.bytes
    else:
        frames = read_frames(data, xing.frame, steps.add)
        _, end = next(islice(frames, xing.frames or 0, None), (0, size))  # one frame more, because the header is a frame, too
    if _part(data, end, 3) == b"TAG":
        end += 128
    return end if end < size else None


def _goes_on(data: _File, at: int) -> bool:
    """Return whether a tag, or two frames of layer III one after the other, begin there."""
    head = _part(data, at, 4)
    if head[:3] == b"ID3":
        return True
    length = frame_bytes(head)
    following = _part(data, at + length, 2)
    return length > 0 and len(following) == 2 and following[0] == 0xFF and following[1] == head[1]


class _Pages:
    """Reads the headers of the pages of an Ogg file."""

    def __init__(self, data: _File, steps: Steps) -> None:
        self._data, self._steps = data, steps
        self._granules: dict[bytes, int] = {}  # of the last page, by stream
        self._longest: dict[bytes, int] = {}  # samples of the longest packet, by stream
        self._rates: dict[bytes, int] = {}
        self._has_holes = self._has_audio = False

    def read(self) -> Links:
        """Return the links.

        Raises:
            InputError: there are more than MOST_LINKS, or more than MOST_STREAMS.
        """
        return Links(tuple(_limited(self._links())), self._has_holes)

    def _links(self) -> Iterator[int]:
        yield 0
        at, size = 0, _size(self._data)
        while at < size:
            self._steps.add()
            head = _part(self._data, at, _PAGE_HEADER + 255 + 64)
            if head[:4] != b"OggS" or len(head) < _PAGE_HEADER:
                following = next((offset for offset, _ in _matches(self._data, rb"OggS\0", at + 1, self._steps)), None)
                if following is None:
                    break
                at = following
                continue
            num_laces = head[26]
            table = head[_PAGE_HEADER : _PAGE_HEADER + num_laces]
            if self._begins_link(head, table):
                yield at
            at += _PAGE_HEADER + num_laces + sum(table)

    def _begins_link(self, head: bytes, table: bytes) -> bool:
        """Read a page. Return whether a link begins with it."""
        stream, body = head[14:18], head[_PAGE_HEADER + len(table) :]
        if head[5] & _FIRST:
            is_start, self._has_audio = self._has_audio, False
            self._begin(stream, body)
            return is_start
        self._continue(stream, head, table, body)
        return False

    def _continue(self, stream: bytes, head: bytes, table: bytes, body: bytes) -> None:
        self._has_audio = True
        granule = int.from_bytes(head[6:14], "little")
        if granule == _NO_GRANULE or stream not in self._rates:
            return
        before, self._granules[stream] = self._granules.get(stream, 0), granule
        packets = sum(lace < 255 for lace in table)
        longest = self._longest[stream] or _opus_samples(body)
        if before and not self._longest[stream] and head[5] & _CONTINUED:
            return  # the first byte is not that of a packet
        hole = granule - before - packets * longest
        self._has_holes = self._has_holes or bool(before and hole > _HOLE * self._rates[stream])

    def _begin(self, stream: bytes, body: bytes) -> None:
        self._granules.pop(stream, None)
        self._rates.pop(stream, None)
        if body[:8] == b"OpusHead":
            self._rates[stream], self._longest[stream] = 48_000, 0
        elif body[:7] == b"\x01vorbis" and len(body) > 28:
            self._rates[stream], self._longest[stream] = int.from_bytes(body[12:16], "little"), 1 << (body[28] >> 4) >> 1
        if len(self._longest) > MOST_STREAMS:
            raise InputError(f"it has more than {MOST_STREAMS:,} streams; split it", code="over_limit", limit=MOST_STREAMS)


def _opus_samples(packet: bytes) -> int:
    """Return the samples of an Opus packet at 48 kHz by its first two bytes (RFC 6716, section 3.1)."""
    if len(packet) < 2:
        return 0
    count = (1, 2, 2, packet[1] & 63)[packet[0] & 3]
    return count * _OPUS_FRAMES[packet[0] >> 3]
