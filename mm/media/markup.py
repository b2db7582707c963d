"""The text of HTML files and of e-books (EPUB), in a codec worker. A chapter is a page.

Source: EPUB 3.3 (w3.org/TR/epub-33): META-INF/container.xml names the package, whose spine orders the chapters.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, Literal, NoReturn
from urllib.parse import unquote
from xml.parsers import expat

from ...callers.errors import InputError
from .archives import SafeZip
from .policy import MediaPolicy

PartKind = Literal[
    "heading", "paragraph", "list_item", "table", "code", "picture", "caption", "formula", "markdown", "plain"
]  # fmt: skip
"""Kinds of blocks; or "markdown" and "plain", a whole page of a text file."""
_XHTML = ("application/xhtml+xml", "text/html")
_MAX_DEPTH = 100  # of elements in the package of a book
_COMMENTS = rb"(?:<!--(?:(?!-->).)*-->\s*)*"  # in which there is one way only to divide a text into comments
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?" + _COMMENTS + rb"<(?:!doctype\s+html|html)\b", re.I | re.S)
_META = rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([\w-]{1,40})"
_CHARSET = re.compile(_META + rb"|<\?xml[^>]{0,100}encoding\s*=\s*[\"']([\w-]{1,40})", re.I)
_SKIPPED = ("script", "style", "title", "template", "noscript", "svg", "iframe", "object")
_PARAGRAPHS = ("p", "div", "section", "article", "blockquote", "body", "dt", "dd", "address", "aside", "main", "figure")
_BLOCKS: dict[str, PartKind] = {
    **dict[str, PartKind].fromkeys(_PARAGRAPHS, "paragraph"),
    **dict[str, PartKind].fromkeys((f"h{level}" for level in range(1, 7)), "heading"),
    "li": "list_item",
    "pre": "code",
    "figcaption": "caption",
}
_CELLS = ("td", "th")


@dataclass(frozen=True)
class TextPart:
    """A block of a text. `text` of a table is HTML with nothing but its rows and cells. `level`: of a heading or list."""

    kind: PartKind
    text: str
    level: int = 0


def is_epub(data: bytes) -> bool:
    """Return whether a file is an e-book: the archive's first file says so, as EPUB requires."""
    return data.startswith(b"PK\3\4") and b"mimetypeapplication/epub+zip" in data[:100]


def is_html(data: bytes) -> bool:
    """Return whether a file is HTML by its first element."""
    return _HTML.match(data[:2048]) is not None


def count_chapters(data: bytes, policy: MediaPolicy) -> int:
    """Return the number of chapters of a book.

    Raises:
        InputError: it is broken, not safe, has no chapters, or exceeds a limit of the policy.
    """
    return len(_chapters(SafeZip(data, policy.max_decoded_bytes)))


def text_parts(data: bytes, number: int, policy: MediaPolicy) -> list[TextPart]:
    """Return the text of an HTML file, or of chapter `number` of a book, counted from 1.

    Raises:
        InputError: as `count_chapters`, or there is no such chapter.
    """
    if not is_epub(data):
        return parts_of(_decoded(data))
    archive = SafeZip(data, policy.max_decoded_bytes)
    chapters = _chapters(archive)
    if not 1 <= number <= len(chapters):
        raise InputError(f"the book has {len(chapters):,} chapters, so it has no page {number}; pages count from 1")
    return parts_of(_decoded(archive.read(chapters[number - 1])))


def _decoded(data: bytes) -> str:
    match = _CHARSET.search(data[:2048])
    name = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else (match[1] or match[2]).decode() if match else "utf-8"
    try:
        return data.decode(name, "replace").removeprefix("\ufeff")
    except (LookupError, UnicodeError):  # some of Python's codecs are no encodings of files, such as "idna"
        return data.decode("utf-8", "replace").removeprefix("\ufeff")


def _chapters(archive: SafeZip) -> list[str]:
    """Return the names of a book's chapters in reading order."""
    if any(name.endswith(("html", "htm")) for name in _encrypted(archive)):  # fonts may be
        raise InputError("the text of the book is encrypted; give one without encryption")
    container = _elements(archive.read("META-INF/container.xml"))
    roots = [attributes["full-path"] for tag, attributes in container if tag == "rootfile" and "full-path" in attributes]
    if not roots:
        raise InputError("the book names no package (META-INF/container.xml); export it again")
    folder, files, spine = posixpath.dirname(roots[0]), dict[str, str](), list[str]()
    for tag, attributes in _elements(archive.read(roots[0])):
        if tag == "item" and attributes.get("media-type") in _XHTML:
            files[attributes.get("id", "")] = posixpath.normpath(posixpath.join(folder, unquote(attributes.get("href", ""))))
        elif tag == "itemref":
            spine.append(attributes.get("idref", ""))
    chapters = [files[name] for name in spine if name in files]
    if not chapters:
        raise InputError("the book has no chapters; give one with at least one")
    return chapters


def _encrypted(archive: SafeZip) -> Iterator[str]:
    """Yield the names of a book's encrypted files."""
    name = "META-INF/encryption.xml"
    for tag, attributes in _elements(archive.read(name)) if name in archive else ():
        if tag == "CipherReference":
            yield attributes.get("URI", "")


def _elements(data: bytes) -> list[tuple[str, dict[str, str]]]:
    """Return the names, without namespaces, and attributes of the elements of XML.

    Raises:
        InputError: it is broken, too deep, or declares entities, which could grow without limit or name other files.
    """
    found, depth = list[tuple[str, dict[str, str]]](), 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise InputError(f"the XML of the book has more than {_MAX_DEPTH} levels", code="over_limit", limit=_MAX_DEPTH)
        found.append((name.rpartition(" ")[2], attributes))

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1

    def refuse(*_: Any) -> NoReturn:
        raise InputError("the XML of the book declares entities, which are not read; export it again without")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.EntityDeclHandler = parser.ExternalEntityRefHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise InputError(f"the XML of the book is broken ({error}); export it again") from None
    return found


def parts_of(text: str) -> list[TextPart]:
    """Return the blocks of HTML. Scripts and styles are left out; nothing is fetched."""
    reader = _HtmlReader()
    reader.feed(text)
    reader.close()
    reader.end_table()
    reader.end_block()
    return reader.parts


@dataclass
class _HtmlReader(HTMLParser):
    """Collects blocks. `_kinds`: of the open elements that are blocks, the innermost last. `_lists`: numbers of open lists."""

    parts: list[TextPart] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _kinds: list[tuple[str, PartKind]] = field(default_factory=list)
    _lists: list[int | None] = field(default_factory=list)
    _marker: str = ""
    _skipped: int = 0
    _table: list[str] | None = None
    _tables: int = 0  # tables in tables

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag in _SKIPPED:
            self._skipped += 1
        elif self._skipped:
            return
        elif tag == "img":
            self._picture(attributes.get("alt", ""))
        elif tag == "br":
            self._text.append("\n" if self._kind == "code" else " ")
        elif tag == "table":
            self._tables += 1
            if self._tables == 1:
                self.end_block()
                self._table = ["<table>"]
        elif self._table is not None and self._tables == 1 and tag in ("tr", *_CELLS):
            self._row(tag, attributes)
        elif tag in ("ul", "ol"):
            self.end_block()
            self._lists.append(1 if tag == "ol" else None)
        elif tag in _BLOCKS and self._table is None:
            self.end_block()
            self._kinds.append((tag, _BLOCKS[tag]))
            if tag == "li":
                self._marker = self._next_marker()

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._skipped = max(self._skipped - 1, 0)
        elif self._skipped:
            return
        elif tag == "table" and self._tables:
            self._tables -= 1
            if not self._tables:
                self.end_table()
        elif tag in ("ul", "ol") and self._lists:
            self.end_block()
            self._lists.pop()
        elif tag in _BLOCKS and self._table is None and any(open_tag == tag for open_tag, _ in self._kinds[-_MAX_DEPTH:]):
            self.end_block()
            while self._kinds.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text.append(data)

    @property
    def _kind(self) -> PartKind:
        return self._kinds[-1][1] if self._kinds else "paragraph"

    def _next_marker(self) -> str:
        if not self._lists or self._lists[-1] is None:
            return "• "
        self._lists[-1] += 1
        return f"{self._lists[-1] - 1}. "

    def _picture(self, alt: str) -> None:
        if self._table is None and alt.strip():
            self.end_block()
            self.parts.append(TextPart("picture", " ".join(alt.split())))

    def _row(self, tag: str, attributes: dict[str, str]) -> None:
        assert self._table is not None
        self._end_cell()
        spans = ((name, attributes.get(name, "")) for name in ("rowspan", "colspan"))
        shown = "".join(f' {name}="{value}"' for name, value in spans if value.isdecimal() and len(value) < 5)
        self._table.append(f"<{tag}{shown if tag in _CELLS else ''}>")

    def _end_cell(self) -> None:
        assert self._table is not None
        text, self._text = " ".join("".join(self._text).split()), []
        self._table.append(html.escape(text, quote=False))

    def end_table(self) -> None:
        """End the open table, if there is one."""
        if self._table is not None:
            self._end_cell()
            self.parts.append(TextPart("table", f"{''.join(self._table)}</table>"))
            self._table = None

    def end_block(self) -> None:
        """End the block of the text so far."""
        if self._table is not None:
            return
        text, self._text = "".join(self._text), []
        kind = self._kind
        text = text.strip("\n") if kind == "code" else " ".join(text.split())
        if not text.strip():
            return
        if kind == "list_item" or (self._marker and self._lists):
            kind, text, self._marker = "list_item", f"{self._marker}{text}", ""
        level = int(self._kinds[-1][0][1]) if kind == "heading" else len(self._lists) if kind == "list_item" else 0
        self.parts.append(TextPart(kind, text, level))
