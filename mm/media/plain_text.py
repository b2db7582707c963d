"""Text files (Markdown and plain text): what is one, its encoding, and its pages. It runs in a codec worker."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...callers.errors import InputError
from .pdf import is_pdf
from .policy import MediaPolicy

TextKind = Literal["markdown", "plain"]
MAX_PAGE = 1 << 16
"""Characters of one page. A longer text goes on on the next page, from an empty line on if there is one."""
GUESSED = "windows-1252"
"""The encoding that is guessed for text that is not Unicode."""
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_PDF_END = 2048  # bytes in which a PDF, which may consist of text alone, says where its table of objects is
_LOOKED_AT = 4096  # bytes from which UTF-16 without a mark is recognised
_ZEROS = 0.4  # share of the high bytes that are 0 in the UTF-16 of most texts, at least
_CONTROLS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # which no text has; tabs, line ends, form feeds and escapes it may
_OTHER_FORMAT = re.compile(rb"\s*(?:<\?xml|<svg|%PDF|%!PS|P[1-3]\s|/\* XPM|#define \w+_width)")
_FOREIGN = re.compile(
    r"""[^\W\d_a-zA-Zß-ïñ-öø-ýÿÀ-ÏÑ-ÖØ-ÝŒœŠšŽžŸ²³¹ªºµ]|[²³¹ªº](?=[^\W\d_])
    |(?<=\w)[^\s\w\x20-\x7e’‘“”–—…·´«»°€](?=\w)|[\x80-\x9f]""",
    re.VERBOSE,
)
"""Characters that show that a text read as Windows-1252 has another encoding: its own words do not have them there."""
_MARKS = re.compile(
    r"""^\ {0,3}(?:\#{1,6}\ +\S|```|~~~|\|?[ \t]*:?-{2,}:?[ \t]*\|[-:|\ \t]*$|[^\s=-].*\n={3,}[ \t]*$)
    |!?\[[^\[\]\n]+\]\([^()\s]+\)|\*\*\S[^*\n]*\*\*""",
    re.MULTILINE | re.VERBOSE,
)
"""Marks of Markdown: headings, code fences, tables, links, strong text."""
_FENCE = re.compile(r"\s{0,3}(?:`{3,}|~{3,})")
_LINE = re.compile(rf"([^\r\n]{{0,{MAX_PAGE}}})(?:\r\n|\r|\n)?")


def is_text(data: bytes) -> bool:
    """Return whether a file is text: it has no bytes that only binary files have. Its encoding may still be unknown."""
    if not data or _OTHER_FORMAT.match(data[:256]) or (is_pdf(data) and b"startxref" in data[-_PDF_END:]):
        return False
    encoding = _unicode(data)
    if encoding is None:
        return _CONTROLS.search(data.decode("latin-1")) is None
    return _CONTROLS.search(data.decode(encoding, "replace")) is None


def decode_text(data: bytes) -> tuple[str, str]:
    """Return the text of a file and its encoding, the name of a Python codec. A byte order mark stays in the text.

    It may be UTF-8, UTF-16 or UTF-32, with or without a byte order mark (UTF-32: with one). If it is none of these, it is
    taken for `GUESSED`, if its letters are those of Western European languages.

    Raises:
        InputError: it is none of these.
    """
    encoding = _unicode(data)
    try:
        text = data.decode(encoding or GUESSED)
    except UnicodeDecodeError as error:
        if encoding is not None:
            reason = f"the text is broken: byte {error.start:,} is not {encoding.upper()}; save it again"
            raise InputError(reason, code="invalid_media", value=error.start) from None
        raise _unknown() from None
    if encoding is None and _FOREIGN.search(text):
        raise _unknown()
    return text, encoding or GUESSED


def _unknown() -> InputError:
    return InputError("the text is neither UTF-8, UTF-16 nor Windows-1252; save it as UTF-8", code="unsupported")


def _unicode(data: bytes) -> str | None:
    """Return the encoding by the byte order mark or the bytes, None if it is not one of Unicode."""
    for mark, name in _BOMS:
        if data.startswith(mark):
            return name
    beginning = data[:_LOOKED_AT]
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        high, low = beginning[first::2], beginning[1 - first :: 2]
        if len(data) % 2 == 0 and high.count(0) > _ZEROS * len(high) and not low.count(0):
            return name
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return "utf-8"


def text_kind(text: str) -> TextKind:
    """Return whether a text has marks of Markdown."""
    return "markdown" if _MARKS.search(text) else "plain"


@dataclass(frozen=True)
class TextPages:
    """The pages of a text file.

    Args:
        encoding: name of a Python codec; `GUESSED` if it is a guess.
        spans: (start, end) of each page in bytes, for at most `max_pdf_pages` pages.
        count: number of all pages.
    """

    kind: TextKind
    encoding: str
    spans: tuple[tuple[int, int], ...]
    count: int


def find_text_pages(data: bytes, policy: MediaPolicy) -> TextPages:
    """Return the pages of a text file. The file is decoded once for all pages.

    Raises:
        InputError: as `decode_text`, or the file is larger than `max_decoded_bytes`.
    """
    if len(data) > (limit := policy.max_decoded_bytes):
        reason = f"the text has {len(data):,} bytes, the limit is {limit:,}; split it"
        raise InputError(reason, code="over_limit", param="max_decoded_bytes", limit=limit, value=len(data))
    text, encoding = decode_text(data)
    spans, at, byte, count = list[tuple[int, int]](), 0, 0, 0  # `byte`: where the character `at` begins
    for start, end in page_spans(text):
        count += 1
        if count <= policy.max_pdf_pages:
            first = byte + len(text[at:start].encode(encoding))
            at, byte = end, first + len(text[start:end].encode(encoding))
            spans.append((first, byte))
    return TextPages(text_kind(text.removeprefix("\ufeff")), encoding, tuple(spans), count)


def page_text(data: bytes, encoding: str) -> str:
    """Return the text of a page's bytes, with line feeds as line ends."""
    return data.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def page_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each page in characters. They end at form feeds, and have at most `MAX_PAGE` characters.

    A page that would be too long ends after its last empty line outside of code, if there is one, else before its last line.
    """
    at = 0
    while at <= len(text):
        feed = text.find("\f", at)
        end = feed if feed >= 0 else len(text)
        yield from _spans(text, at, end)
        at = end + 1


def _spans(text: str, at: int, stop: int) -> Iterator[tuple[int, int]]:
    start, best, is_code = at, at, False  # `best`: where a page may end
    while at < stop:
        match = _LINE.match(text, at, stop)
        assert match is not None  # any text begins with a line
        while match.end(1) - start > MAX_PAGE:
            end = best if best > start else at
            yield start, end
            start = end
        is_code ^= _FENCE.match(match[1]) is not None
        at = match.end()
        best = at if not match[1].strip() and not is_code else best
    yield start, stop
