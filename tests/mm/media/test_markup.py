"""The text of books and HTML files: blocks, chapters, and archives and XML that are not safe."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Mapping

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.media.archives import SafeZip
from sensorium.mm.media.isolate import run_isolated
from sensorium.mm.media.markup import TextPart, count_chapters, is_epub, is_html, parts_of, text_parts
from sensorium.mm.media.page_facts import page_facts
from sensorium.mm.media.policy import MediaPolicy

POLICY = MediaPolicy()
CONTAINER = '<container xmlns="urn:oasis"><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>'
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
<item id="b" href="text/two%20b.xhtml" media-type="application/xhtml+xml"/><item id="i" href="i.png" media-type="image/png"/>
<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="a"/><itemref idref="i"/><itemref idref="b"/></spine></package>"""
HEAD = '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html><head><title>t</title></head>'
ONE = f"{HEAD}<body><h1>One</h1><p>a&nbsp;b</p></body></html>"


def archive(files: Mapping[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as base:
        for name, data in files.items():
            base.writestr(name, data)
    return file.getvalue()


def book(**changes: str | bytes) -> bytes:
    """Return a book of two chapters; `container`, `package`, `one`, `two` and `encryption` replace its files."""
    names = {
        "container": "META-INF/container.xml",
        "package": "OPS/book.opf",
        "one": "OPS/one.xhtml",
        "two": "OPS/text/two b.xhtml",
    }
    files: dict[str, str | bytes] = {"mimetype": "application/epub+zip"}
    files |= {
        names[key]: changes.get(key, value) for key, value in (("container", CONTAINER), ("package", PACKAGE), ("one", ONE))
    }
    files[names["two"]] = changes.get("two", "<html><body><h2>Two</h2></body></html>")
    return archive(files | ({"META-INF/encryption.xml": changes["encryption"]} if "encryption" in changes else {}))


def test_chapters_are_in_the_order_of_the_spine() -> None:
    data = book()
    assert is_epub(data)
    assert run_isolated(count_chapters, data, POLICY) == 2
    first, second = run_isolated(page_facts, data, [1, 2], POLICY)
    assert first.parts == (TextPart("heading", "One", 1), TextPart("paragraph", "a b"))
    assert second.parts == (TextPart("heading", "Two", 2),)
    assert (first.num_chars, first.num_cut, first.lines) == (5, 0, ())


BOMB = '<!DOCTYPE p [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><package>&b;</package>'
LEAK = '<!DOCTYPE p [<!ENTITY a SYSTEM "file:///etc/passwd">]><package>&a;</package>'
LOCKED = '<e xmlns="x"><EncryptedData><CipherReference URI="OPS/one.xhtml"/></EncryptedData></e>'


@pytest.mark.parametrize(
    "data",
    [
        book(package=BOMB),
        book(package=LEAK),
        book(container=BOMB),
        book(package="<package>"),
        book(package="<a>" * 200 + "</a>" * 200),
        book(package="<package/>"),
        book(container="<container/>"),
        book(container='<container><rootfile full-path="../../etc/passwd"/></container>'),
        book(encryption=LOCKED),
        book()[:-40],
        archive({"mimetype": "application/epub+zip"}),
    ],
    ids=["entities", "file", "container", "broken", "deep", "empty", "no root", "outside", "locked", "cut off", "nothing"],
)
def test_books_that_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        count_chapters(data, POLICY)


def test_fonts_may_be_encrypted() -> None:
    assert count_chapters(book(encryption=LOCKED.replace("one.xhtml", "font.otf")), POLICY) == 2


def test_a_chapter_is_not_larger_than_the_limit() -> None:
    data = book(one="<p>" + "a" * 5000)
    with pytest.raises(InputError) as caught:
        text_parts(data, 1, MediaPolicy(max_decoded_bytes=4000))
    assert (caught.value.info.code, caught.value.info.param) == ("over_limit", "max_decoded_bytes")
    with pytest.raises(InputError):
        text_parts(book(), 3, POLICY)


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "C:/a", "..\\a"])
def test_paths_that_lead_out_of_the_archive(name: str) -> None:
    with pytest.raises(InputError):
        SafeZip(archive({name: "x"}), 100)


def test_archives_that_are_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    link = zipfile.ZipInfo("a")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as base:
        base.writestr(link, "/etc/passwd")
    with pytest.raises(InputError):
        SafeZip(file.getvalue(), 100)
    twice = archive({"a": "x", "b": "y"}).replace(b"b", b"a")
    with pytest.raises(InputError):
        SafeZip(twice, 100)
    monkeypatch.setattr("sensorium.mm.media.archives.MAX_FILES", 1)
    with pytest.raises(InputError) as caught:
        SafeZip(archive({"a": "x", "b": "y"}), 100)
    assert (caught.value.info.limit, caught.value.info.value) == (1, 2)


def test_a_file_with_broken_lzma() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_LZMA) as opened:
        opened.writestr("a.txt", "text " * 100)
    content = bytearray(data.getvalue())
    content[45:60] = b"\xff" * 15
    with pytest.raises(InputError):
        SafeZip(bytes(content), 1 << 20).read("a.txt")


def test_the_limit_holds_for_all_files_together() -> None:
    files = SafeZip(archive({"a": "x" * 60, "b": "y" * 60}), 100)
    assert files.read("a") == b"x" * 60
    with pytest.raises(InputError) as caught:
        files.read("b")
    assert caught.value.info.limit == 100
    with pytest.raises(InputError):
        files.read("c")


@pytest.mark.parametrize(
    ("html", "parts"),
    [
        ("<p>one<br>two <b>bold</b></p>three", [TextPart("paragraph", "one two bold"), TextPart("paragraph", "three")]),
        ("<ul><li>a<li>b</ul>", [TextPart("list_item", "• a", 1), TextPart("list_item", "• b", 1)]),
        ("<ol><li><p>a</p></li><li>b<ul><li>c</ul></ol>", [
            TextPart("list_item", "1. a", 1), TextPart("list_item", "2. b", 1), TextPart("list_item", "• c", 2),
        ]),
        ("<pre>a  b\n c</pre>", [TextPart("code", "a  b\n c")]),
        ("<script>alert(1)</script><style>p{}</style><p>x</p>", [TextPart("paragraph", "x")]),
        ("<table><tr><th colspan=2>a</th></tr><tr><td>1 &lt;<td>2</table>", [
            TextPart("table", '<table><tr><th colspan="2">a<tr><td>1 &lt;<td>2</table>'),
        ]),
        ("<figure><img alt='A cat'><figcaption>A cat.</figcaption></figure>", [
            TextPart("picture", "A cat"), TextPart("caption", "A cat."),
        ]),
        ("</div></p><p>x", [TextPart("paragraph", "x")]),
        ("<html><head><title>a</title><meta><body><p>x", [TextPart("paragraph", "x")]),
        ("<p>a<table><tr><td>b", [TextPart("paragraph", "a"), TextPart("table", "<table><tr><td>b</table>")]),
        ("", []),
    ],
)  # fmt: skip
def test_blocks_of_html(html: str, parts: list[TextPart]) -> None:
    assert parts_of(html) == parts


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"<!DOCTYPE html><p>x", True),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<html xmlns="x">', True),
        (b"<!-- a --><HTML>", True),
        (b"<!-- a - -> --> <!----><HTML>", True),
        (b"<!---->" * 250, False),
        (b"<svg>", False),
        (b"%PDF-1.7 <html>", False),
    ],
)
def test_html_is_known_by_its_first_element(data: bytes, expected: bool) -> None:
    assert is_html(data) is expected


def test_characters_are_decoded_as_the_file_says() -> None:
    latin = '<html><head><meta charset="iso-8859-1"></head><p>\xe4</p>'.encode("latin-1")
    assert run_isolated(page_facts, latin, [1], POLICY)[0].parts == (TextPart("paragraph", "ä"),)
    assert text_parts("<html><p>ä".encode("utf-16"), 1, POLICY) == [TextPart("paragraph", "ä")]
    for name in (b"nonsense", b"undefined", b"idna", b"punycode"):
        assert text_parts(b'<html><meta charset="%b"><p>\xc3\xa4' % name, 1, POLICY) == [TextPart("paragraph", "ä")]


def test_long_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.mm.media.page_facts.MAX_CHARS", 3)
    (facts,) = page_facts(b"<html><p>abc</p><p>defg</p>", [1], POLICY)
    assert (facts.parts, facts.num_cut) == ((TextPart("paragraph", "abc"),), 4)
