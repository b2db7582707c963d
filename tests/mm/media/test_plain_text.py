"""Text files: what is one, its encoding, whether it is Markdown, and its pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.callers.errors import InputError
from sensorium.mm.media.isolate import run_isolated
from sensorium.mm.media.markup import TextPart
from sensorium.mm.media.page_facts import text_facts
from sensorium.mm.media.plain_text import (
    GUESSED,
    MAX_PAGE,
    TextPages,
    decode_text,
    find_text_pages,
    is_text,
    page_spans,
    page_text,
    text_kind,
)
from sensorium.mm.media.policy import MediaPolicy

POLICY = MediaPolicy()
GERMAN = "Größe der Tür: 25 m², „Zitat“ – 5 €"


def text_pages(data: bytes) -> list[str]:
    pages = find_text_pages(data, POLICY)
    return [page_text(data[start:end], pages.encoding) for start, end in pages.spans]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_encodings_of_unicode_are_found(encoding: str) -> None:
    data = f"{GERMAN}\r\nzwei\rdrei".encode(encoding)
    assert is_text(data)
    assert text_pages(data) == [f"{GERMAN}\nzwei\ndrei"]


def test_windows_1252_is_a_guess_that_other_encodings_are_not_taken_for() -> None:
    assert decode_text(GERMAN.encode("windows-1252")) == (GERMAN, GUESSED)
    assert decode_text("Où êtes-vous, señor Ångström ?".encode("latin-1"))[1] == GUESSED
    others = {
        "windows-1251": "Привет, мир",
        "koi8-r": "Привет, мир и люди",
        "windows-1250": "Zażółć gęślą jaźń",
        "windows-1254": "ağaç ışığı şimdi",
        "shift-jis": "日本語の文章です",
        "gbk": "中文文本",
    }
    for encoding, text in others.items():
        data = text.encode(encoding)
        assert is_text(data), encoding
        with pytest.raises(InputError) as caught:
            decode_text(data)
        assert caught.value.info.code == "unsupported", encoding
    with pytest.raises(InputError) as caught:
        decode_text(b"\xef\xbb\xbfab\xff")
    assert (caught.value.info.code, caught.value.info.value) == ("invalid_media", 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\1",
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.7",
        b"a line before\n%PDF-1.4\n1 0 obj\n<<>>\nendobj\nstartxref\n9\n%%EOF\n",
        b"P2\n1 1\n255\n0",
        b"<?xml version='1.0'?><svg/>",
        b"<svg></svg>",
        b"a\0b",
    ],
)
def test_other_files_are_no_text(data: bytes) -> None:
    assert not is_text(data)


def test_text_about_pdfs_is_text() -> None:
    assert is_text(b"A file that begins with `%PDF-1.7` is a PDF.")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("# Title", "markdown"),
        ("Title\n=====\n", "markdown"),
        ("```\nx\n```", "markdown"),
        ("| a | b |\n|---|---|\n", "markdown"),
        ("see [the page](https://a.example)", "markdown"),
        ("a **strong** word", "markdown"),
        ("#hashtag, 2 ** 3 ** 4, a[0](x y)", "plain"),
        ("- an item\n- another\n\n---\n", "plain"),
    ],
)
def test_marks_of_markdown(text: str, kind: str) -> None:
    assert text_kind(text) == kind


def test_pages_end_at_form_feeds_and_at_the_last_empty_line_before_the_limit() -> None:
    assert text_pages(b"a\n\fb\n\fc") == ["a\n", "b\n", "c"]
    paragraph = "word " * 2000 + "\n\n"
    pages = text_pages(paragraph.encode() * 16)
    assert "".join(pages) == paragraph * 16
    assert len(pages) == 3
    assert all(len(page) <= MAX_PAGE and page.startswith("word") for page in pages)
    code = "```\n" + "x\n\n" * (MAX_PAGE // 4) + "```\n\n"
    assert [page.count("```") for page in text_pages(("a paragraph\n\n" * 2000 + code).encode())] == [0, 2]


@given(st.text("ab \n\r\f`é€", max_size=400), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "windows-1252"]))
def test_pages_are_all_of_the_file(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    assert "".join(text[start:end] for start, end in page_spans(text)) == text.replace("\f", "")
    decoded, found = decode_text(data)
    spans = find_text_pages(data, POLICY).spans
    pages = [page_text(data[start:end], found) for start, end in spans]
    expected = decoded.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert "\f".join(pages) == expected


@given(st.lists(st.integers(0, MAX_PAGE + 9), max_size=6), st.sampled_from(["\n", "\r\n", "\n\n", " ", "\n```\n"]))
def test_no_page_is_longer_than_the_limit(lengths: list[int], between: str) -> None:
    text = between.join("x" * length for length in lengths)
    spans = list(page_spans(text))
    assert all(end - start <= MAX_PAGE + len(between) for start, end in spans)
    assert "".join(text[start:end] for start, end in spans) == text


def test_a_line_longer_than_a_page_is_divided() -> None:
    pages = text_pages(b"x" * (2 * MAX_PAGE + 1))
    assert [len(page) for page in pages] == [MAX_PAGE, MAX_PAGE, 1]


def test_facts_of_pages() -> None:
    data = "# Größe\n\ftwo\n\f".encode("windows-1252")
    pages = run_isolated(find_text_pages, data, POLICY)
    assert pages == TextPages("markdown", GUESSED, ((0, 8), (9, 13), (14, 14)), 3)
    first, third = run_isolated(text_facts, data[:8], [8, 0], pages.kind, pages.encoding, POLICY)
    assert (first.parts, first.num_chars, first.guessed_encoding) == ((TextPart("markdown", "# Größe\n"),), 6, True)
    assert (third.parts, third.num_chars) == ((), 0)
    with pytest.raises(InputError) as caught:
        find_text_pages(b"a" * 65, MediaPolicy(max_decoded_bytes=64))
    assert (caught.value.info.code, caught.value.info.param) == ("over_limit", "max_decoded_bytes")


def test_few_spans_of_a_text_with_many_pages_are_kept() -> None:
    pages = find_text_pages(b"\f" * 1000, MediaPolicy(max_pdf_pages=10))
    assert (len(pages.spans), pages.count) == (10, 1001)
