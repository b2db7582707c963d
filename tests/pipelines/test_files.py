"""Folders, patterns and PDFs as inputs of `ocr` and `transcribe`, the sources of results, and transcripts as subtitles."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image, features
from sensorium import LLM, AsyncLLM, InputError, Media, PdfPage, pdf_pages
from sensorium.callers.errors import ErrorInfo
from sensorium.mm.media import gate
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource
from sensorium.mm.types import ImageItem
from sensorium.pipelines.files import images_and_pages, local_files, named_items
from sensorium.pipelines.speech.results import SkippedSpan, Transcript
from sensorium.pipelines.speech.segments import Attempt, Segment, WindowResult

ASSETS = Path(__file__).resolve().parents[2] / "assets"
LINES = [ASSETS / "media" / f"line{number}.png" for number in (1, 2, 3)]
ANSWERS = [json.loads((ASSETS / "media" / "answers.json").read_text("utf-8"))[path.name]["answer"] for path in LINES]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-vl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images, a PDF of three pages, a broken PDF, a PDF without the suffix, and a text."""
    shutil.copy(LINES[0], tmp_path / "a.png")
    shutil.copy(LINES[1], tmp_path / "b.PNG")
    first, *others = [Image.open(path).convert("RGB") for path in LINES]
    first.save(tmp_path / "c.pdf", save_all=True, append_images=others, resolution=144.0, quality=95)
    (tmp_path / "d.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_ocr_reads_a_folder_and_says_where_each_text_is_from(llm: LLM, folder: Path) -> None:
    pages = llm.ocr(folder, use_tqdm=False)
    names = ["a.png", "b.PNG", "c.pdf#page=1", "c.pdf#page=2", "c.pdf#page=3", "d.pdf"]
    assert [page.source for page in pages] == [str(folder / name) for name in names]
    assert [page.text for page in pages] == [*ANSWERS[:2], *ANSWERS, ""]
    assert [page.error is None for page in pages] == [True] * 5 + [False]
    assert str(pages[-1].error).startswith("the PDF cannot be read")
    assert (pages[-1].error.code, pages[-1].error.modality, pages[-1].error.index) == ("invalid_media", "image", 5)
    assert f"source={str(folder / 'a.png')!r}" in repr(pages[0])


def test_every_form_of_a_pdf_gives_its_pages(llm: LLM, folder: Path) -> None:
    path, data = folder / "c.pdf", (folder / "c.pdf").read_bytes()
    shutil.copy(path, folder / "scan")
    with path.open("rb") as file:
        for form in (path, str(path), data, bytearray(data), Media(path), folder / "scan", file, path.as_uri()):
            pages = llm.ocr(form, use_tqdm=False)
            assert [page.text for page in pages] == ANSWERS
            assert [page.source.rpartition("#")[2] for page in pages] == ["page=1", "page=2", "page=3"]
            assert all(bool(page.source.partition("#")[0]) != isinstance(form, bytes | bytearray) for page in pages)


FORMATS = ("PDF", "TIFF", "GIF", "PNG", *(name for name in ("WEBP", "AVIF") if features.check(name.lower())))


@pytest.mark.parametrize("form", FORMATS)
def test_pages_do_not_depend_on_how_a_file_is_handed_over(form: str, tmp_path: Path) -> None:
    first, *others = [Image.new("RGB", (64, 48), color) for color in ("red", "green", "blue")]
    buffer = io.BytesIO()
    first.save(buffer, form, save_all=True, append_images=others)
    data = buffer.getvalue()
    buffer.seek(7)
    (path := tmp_path / "a scan").write_bytes(data)  # no extension, and a space that its URL escapes
    encoded = base64.b64encode(data).decode()
    urls = [f"data:{kind};base64,{encoded}" for kind in (f"image/{form.lower()}", "application/octet-stream")]
    urls += [f" DATA:;base64,{encoded}", f"data:,{quote(data)}", path.as_uri(), path.as_uri().replace("file", "FILE")]
    with path.open("rb") as file, path.open("rb", buffering=0) as raw:
        for item in (data, bytearray(data), memoryview(data), path, str(path), buffer, file, raw, *urls, Media(buffer)):
            pages = [named.item for named in images_and_pages([item])]
            pages = [page.data if isinstance(page, Media) else page for page in pages]
            assert [getattr(page, "number", None) for page in pages] == [1, 2, 3]
            source = gate.load(MediaSource("image", 0, pages[1]), MediaPolicy())
            (image,) = gate.decode(source, DecodeSpec(), MediaPolicy())
            assert isinstance(image, ImageItem)
            assert np.abs(image.pixels.numpy().astype(int) - (0, 128, 0)).max() <= 16
    assert buffer.tell() == 7


def test_urls_are_recognised_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by their names. Only the first bytes of a file without pages are fetched."""
    files, asked = dict[str, bytes](), list[tuple[str, int | None]]()
    for form in FORMATS:
        first, *others = [Image.new("RGB", (64, 48), color) for color in ("red", "green", "blue")]
        first.save(buffer := io.BytesIO(), form, save_all=True, append_images=others)
        files[f"https://host/{form}?id=1"] = buffer.getvalue()
    Image.new("RGB", (64, 48)).save(buffer := io.BytesIO(), "PNG")
    files["https://host/scan.tif"] = files["https://host/plain.pdf"] = files["https://host/large"] = buffer.getvalue()

    def fetch(url: str, policy: MediaPolicy, ledger: object = None, most: int | None = None) -> bytes:
        assert policy.max_pdf_pages == 77
        asked.append((url, most))
        if url not in files:
            raise InputError("it is gone")
        return files[url][:most]

    monkeypatch.setattr("sensorium.mm.media.fetch.fetch", fetch)
    urls = [*files, " https://host/TIFF?id=1\n", "https://host/gone.gif", "https://host/gone"]
    named = list(images_and_pages([*urls, *urls], MediaPolicy(max_pdf_pages=77)))
    paged = [f"https://host/{form}?id=1" for form in FORMATS]
    for url in (*paged, " https://host/TIFF?id=1\n"):
        assert [item.source for item in named if item.source.startswith(url)] == [f"{url}#page={i}" for i in (1, 2, 3)] * 2
    assert [item.item for item in named if item.source in urls and item.source != "https://host/plain.pdf"] == [
        url for url in (*urls, *urls) if url.strip() not in paged and url != "https://host/plain.pdf"
    ]
    (wrong, _) = [item.item for item in named if item.source == "https://host/plain.pdf"]
    assert isinstance(wrong, InputError)
    whole = [url for url, most in asked if most is None]
    assert {url.strip() for url in whole} == {*paged, "https://host/plain.pdf"}


def test_what_cannot_be_looked_into_is_left_to_the_engine(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def seekable(self) -> bool:
            raise RuntimeError

    reader, writer = os.pipe()
    os.write(writer, b"GIF89a")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        items = [Broken(b"II*\0"), io.StringIO("GIF89a"), "data:image/gif;base64,R0lGODlh?", "data:image/gif", pipe]
        items += ["file://host/a.gif", "file:///none.gif", str(tmp_path / "none.tif"), "data:image/gif;base64,", b"", 7, None]
        assert [named.item for named in images_and_pages(items)] == items
        assert pipe.read() == b"GIF89a"


def test_a_pattern_and_a_folder_without_images(llm: LLM, folder: Path) -> None:
    (folder / "empty").mkdir()
    two, nothing, none = llm.ocr([f"{folder}/*.png"], use_tqdm=False), *llm.ocr([folder / "empty", f"{folder}/*.bmp"])
    assert [page.text for page in two] == ANSWERS[:1]
    assert "holds no file of the kinds png, " in str(nothing.error)
    assert "no file matches" in str(none.error)


def test_too_many_pages_and_the_policy_of_the_engine(folder: Path) -> None:
    with LLM("tiny-vl", media={"max_pdf_pages": 2}) as small:
        pages = small.ocr([folder / "c.pdf", LINES[0]], use_tqdm=False)
    assert [page.text for page in pages] == ["", ANSWERS[0]]
    assert pages[0].error is not None
    assert pages[0].error.param == "max_pdf_pages"


def test_coroutines_read_folders_too(llm: LLM, folder: Path) -> None:
    async def read() -> list[str]:
        return [page.source for page in await AsyncLLM(llm).ocr(folder, max_tokens=1)]

    assert asyncio.run(read()) == [item.source for item in images_and_pages([folder])]


def test_a_page_of_a_pdf_keeps_its_source_and_number(folder: Path) -> None:
    path = folder / "c.pdf"
    pages = pdf_pages(path)
    assert [(page.source, page.number) for page in pages] == [(str(path), number) for number in (1, 2, 3)]
    assert repr(pages[1]) == f"PdfPage({str(path)!r}, 2)"
    from_bytes = pdf_pages(path.read_bytes())[0]
    assert (from_bytes.source, repr(from_bytes)) == ("", f"PdfPage(<{path.stat().st_size:,} bytes>, 1)")
    assert repr(PdfPage("scan.pdf", 7)) == "PdfPage('scan.pdf', 7)"
    with path.open("rb") as file:
        assert pdf_pages(file)[2].source == str(path)


def test_names_of_items_without_a_path() -> None:
    image = Image.new("RGB", (4, 4))
    url = f"data:image/png;base64,{'A' * 100}"
    with Image.open(LINES[0]) as opened:
        items = list(named_items([image, b"", np.zeros((4, 4, 3), np.uint8), url, opened], "image"))
    assert [item.source for item in items] == ["", "", "", f"{url[:40]}...", str(LINES[0])]


def test_transcribe_reads_a_folder(tmp_path: Path) -> None:
    for name in ("alarm.flac", "date.flac"):
        shutil.copy(ASSETS / "speech" / name, tmp_path)
    with LLM("tiny-asr") as llm:
        found = llm.transcribe(str(tmp_path), use_tqdm=False)
        apart = llm.transcribe([tmp_path / "alarm.flac", (tmp_path / "date.flac").read_bytes()], use_tqdm=False)
        (none,) = llm.transcribe(f"{tmp_path}/*.wav", use_tqdm=False)
    assert [one.source for one in found] == [str(tmp_path / "alarm.flac"), str(tmp_path / "date.flac")]
    assert [one.text for one in found] == [one.text for one in apart]
    assert [one.source for one in apart] == [str(tmp_path / "alarm.flac"), ""]
    assert "no file matches" in str(none.error)


PARTS = (Segment(0.0, 2.5, "Hello.", 1), Segment(3.0, 4.0, "a & b", 2))
HEARD = Transcript("Hello. a & b", "en", PARTS, None, None, duration=10.0)  # type: ignore[arg-type]


def test_a_transcript_writes_subtitles() -> None:
    assert HEARD.to_srt() == "1\n00:00:00,000 --> 00:00:02,500\nHello.\n\n2\n00:00:03,000 --> 00:00:04,000\na & b"
    assert HEARD.to_vtt().splitlines()[:3] == ["WEBVTT", "", "00:00:00.000 --> 00:00:02.500"]
    assert "a &amp; b" in HEARD.to_vtt()
    assert HEARD.to_tsv() == "start\tend\ttext\n0\t2500\tHello.\n3000\t4000\ta & b"
    assert HEARD.to_markdown() == "**00:00:00** Hello.\n\n**00:00:03** a & b"
    assert HEARD.to_srt(max_line_width=3, max_line_count=1).count("-->") == 3
    for width, count, param in ((0, None, "max_line_width"), (True, None, "max_line_width"), (42, 0, "max_line_count")):
        with pytest.raises(InputError) as caught:
            HEARD.to_srt(width, count)
        assert caught.value.info.code == "invalid_value"
        assert caught.value.info.param == param


def test_a_failed_transcript_raises_its_error_instead_of_empty_subtitles() -> None:
    failed = Transcript("", None, None, ErrorInfo("invalid_media", "the file is broken"), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the file is broken"):
        failed.to_srt()


def test_a_transcript_as_json(tmp_path: Path) -> None:
    with LLM("tiny-asr") as llm:
        (heard,) = llm.transcribe(ASSETS / "speech" / "alarm.flac", timestamps=True, use_tqdm=False)
        (failed,) = llm.transcribe(b"no sound", use_tqdm=False)
    fields = json.loads(heard.to_json())
    assert fields["text"] == heard.text
    assert [part["text"] for part in fields["segments"]] == [part.text for part in heard.segments or ()]
    assert json.loads(failed.to_json())["error"]["code"] == failed.error.code  # type: ignore[union-attr]


def test_skipped_spans_say_where_there_is_no_text_and_why() -> None:
    window = WindowResult(4.0, 9.0, "", (Attempt(0.0, None, 0.0),), 0, skipped="no_speech")
    spoken = Transcript("", "en", None, None, None, windows=(window,), speech_spans=((1.0, 3.0), (5.0, 8.0)), duration=9.0)  # type: ignore[arg-type]
    expected = [(0.0, 1.0, "silence"), (3.0, 5.0, "silence"), (5.0, 8.0, "no_speech"), (8.0, 9.0, "silence")]
    assert list(spoken.skipped_spans) == [SkippedSpan(*span) for span in expected]
    whole = Transcript("", "en", None, None, None, windows=(window,), duration=9.0)  # type: ignore[arg-type]
    assert whole.skipped_spans == (SkippedSpan(4.0, 9.0, "no_speech"),)
    silent = Transcript("", None, None, None, None, speech_spans=(), duration=2.0)  # type: ignore[arg-type]
    assert silent.skipped_spans == (SkippedSpan(0.0, 2.0, "silence"),)


def test_repr_says_what_is_loaded(llm: LLM) -> None:
    facts = "architecture='Qwen2_5_VLForConditionalGeneration', device='cpu', dtype='float32'"
    assert repr(llm) == f"LLM(model={str(ASSETS / 'tiny-vl')!r}, {facts})"
    assert repr(AsyncLLM(llm)) == f"Async{llm!r}"


def test_an_empty_path() -> None:
    with pytest.raises(InputError, match="the path is empty") as caught:
        local_files("", "image")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "image")


@pytest.mark.parametrize("denied", ["the folder", "its files"])
def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, denied):
    (tmp_path / "a.png").write_bytes(b"")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(*((os, "scandir") if denied == "the folder" else (Path, "is_file")), refuse)
    with pytest.raises(InputError) as caught:
        local_files(str(tmp_path), "image")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_media", "image")
