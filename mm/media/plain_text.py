"""Text files (Markdown and plain text): what is one, its encoding, and its pages. It runs in a codec worker."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Literal

from ...callers.errors import InputError
from .pdf import is_pdf
from .policy import MediaPolicy

TextKind = Literal["markdown", "plain"]
MAX_PAGE = 1 << 16
"""Characters of one page. A longer text goes on on the next page, from an empty line on if there is one."""
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


def is_text(data: bytes) -> bool:
    """Return whether a file is text: it has no bytes that only binary files have. Its encoding may still be unknown."""
    if not data or _OTHER_FORMAT.match(data[:256]) or (is_pdf(data) and b"startxref" in data[-_PDF_END:]):
        return False
    encoding = _unicode(data)
    if encoding is None:
        return _CONTROLS.search(data.decode("latin-1")) is None
    return _CONTROLS.search(data.decode(encoding, "replace")) is None


def decode_text(data: bytes) -> tuple[str, bool]:
    """Return the text of a file, with line feeds as line ends, and whether its encoding is a guess.

    It may be UTF-8, UTF-16 or UTF-32, with or without a byte order mark (UTF-32: with one). If it is none of these, it is
    taken for Windows-1252, if its letters are those of Western European languages.

    Raises:
        InputError: it is none of these.
    """
    encoding = _unicode(data)
    try:
        text = data.decode(encoding or "windows-1252")
    except UnicodeDecodeError as error:
        if encoding is not None:
            reason = f"the text is broken: byte {error.start:,} is not {encoding.upper()}; save it again"
            raise InputError(reason, code="invalid_media", value=error.start) from None
        raise _unknown() from None
    if encoding is None and _FOREIGN.search(text):
        raise _unknown()
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"), encoding is None


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


def text_pages(text: str) -> list[str]:
    """Return the pages of a text: it is divided at form feeds, and where a page would have more than `MAX_PAGE` characters."""
    return [page for part in text.split("\f") for page in _pages(part)]


def _pages(text: str) -> Iterator[str]:
    page, size, best, is_code = list[str](), 0, 0, False  # `best`: lines of the page before its last empty line
    for line in _lines(text):
        if size + len(line) > MAX_PAGE and page:
            first = page[: best or len(page)]
            yield "\n".join(first)
            page = page[len(first) :]
            size, best = sum(map(len, page)) + len(page), 0
        is_code ^= _FENCE.match(line) is not None
        page.append(line)
        size += len(line) + 1
        best = len(page) if not line.strip() and not is_code else best
    yield "\n".join(page)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, those that fill more than a page in parts."""
    for line in text.split("\n"):
        yield from (line[at : at + MAX_PAGE] for at in range(0, max(len(line), 1), MAX_PAGE))


def count_text_pages(data: bytes, policy: MediaPolicy) -> int:
    """Return the number of pages of a text file.

    Raises:
        InputError: as `decode_text`, or the file is larger than `max_decoded_bytes`.
    """
    if len(data) > (limit := policy.max_decoded_bytes):
        reason = f"the text has {len(data):,} bytes, the limit is {limit:,}; split it"
        raise InputError(reason, code="over_limit", param="max_decoded_bytes", limit=limit, value=len(data))
    return len(text_pages(decode_text(data)[0]))
