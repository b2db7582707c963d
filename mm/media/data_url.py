"""Bodies of data: URLs, and base64, read as browsers read them.

A URL loses spaces and control characters at its ends, and tabs and newlines anywhere; its fragment is no part of the data (URL
Standard, 4.4). Its body is percent-decoded (Fetch Standard, 6). Base64 may hold ASCII whitespace and lack its padding (Infra
Standard, 7, "forgiving-base64 decode"). A text is read in pieces, because one call over a long text would hold the
interpreter's lock.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from ...callers.pacing import releasing_gil

PIECE = 1 << 18  # characters read at once, a multiple of 4: less than 1 ms with the interpreter's lock
_START = re.compile(r"[\0-\x20]*data:", re.IGNORECASE)
_HEAD_LENGTH = 1024  # of the media type with its parameters
_BASE64 = re.compile(r";[ ]*base64$", re.IGNORECASE)
_SPACES = b"\t\n\f\r "
_DROPPED = {ord(space): None for space in "\t\n\r"}
_AT_END = "".join(map(chr, range(33)))


class DataUrl(NamedTuple):
    """Parts of a data: URL. `media_type` is in lower case, without parameters; the body begins at `start`."""

    media_type: str
    is_base64: bool
    start: int


def is_data_url(text: str) -> bool:
    return _START.match(text) is not None


def split_data_url(url: str) -> DataUrl | None:
    """Return the parts of a data: URL; None if it has no comma within its first 1024 characters."""
    match = _START.match(url)
    comma = url.find(",", match.end(), match.end() + _HEAD_LENGTH) if match else -1
    if match is None or comma < 0:
        return None
    head = url[match.end() : comma].translate(_DROPPED).strip(" \f")
    return DataUrl(head.partition(";")[0].strip().lower(), _BASE64.search(head) is not None, comma + 1)


def body_pieces(url: str, parts: DataUrl) -> Iterator[bytes]:
    """Yield the percent-decoded body of a data: URL. Raise ValueError for lone surrogates."""
    left, end = "", len(url)
    while end > parts.start and url[end - 1] in _AT_END:
        end -= 1
    for start in releasing_gil(range(parts.start, end, PIECE)):
        text, fragment, _ = url[start : min(start + PIECE, end)].partition("#")
        text, left = left + text.translate(_DROPPED), ""
        goes_on = not fragment and start + PIECE < end
        if goes_on and (escape := text.rfind("%", max(0, len(text) - 2))) >= 0:  # its rest is in the next piece
            text, left = text[:escape], text[escape:]
        yield unquote_to_bytes(text) if "%" in text else text.encode()
        if fragment:
            return


def base64_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pieces of base64 without whitespace, each a multiple of 4 characters long but the last."""
    left = b""
    for piece in pieces:
        piece = left + piece.translate(None, _SPACES)
        whole = len(piece) - len(piece) % 4
        left = piece[whole:]
        if whole:
            yield piece[:whole]
    if left:
        yield left


def decoded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes that the pieces of `base64_pieces` stand for. Raise ValueError if they are not valid base64."""
    ended = False
    for piece in pieces:
        if ended or (len(piece) % 4 and b"=" in piece):
            raise ValueError("the base64 goes on after its padding, or has too little of it")
        yield base64.b64decode(piece + b"=" * (-len(piece) % 4), validate=True)
        ended = piece.endswith(b"=")


def text_pieces(text: str) -> Iterator[bytes]:
    """Yield an ASCII text in pieces. Raise ValueError for other characters."""
    return (text[start : start + PIECE].encode("ascii") for start in releasing_gil(range(0, len(text), PIECE)))
