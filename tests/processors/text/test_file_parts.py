"""Parts of messages that hold files, in the forms of OpenAI and Anthropic."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.media import pdf
from sensorium.mm.media.policy import MediaPolicy, MediaUrl, PdfFile, PdfPage, slow_error
from sensorium.processors.text.message_parts import split_media

PNG, MP3 = "data:image/png;base64,AA==", "data:audio/mpeg;base64,AA=="


def split(part: Any) -> Any:
    messages, media, _ = split_media([{"role": "user", "content": [part]}])
    return messages, media


@pytest.mark.parametrize(
    ("part", "modality", "url"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, "image", PNG),
        ({"source": {"type": "url", "url": "https://x/y"}, "type": "image", "cache_control": {}}, "image", "https://x/y"),
        ({"type": "file", "file": {"file_data": PNG, "filename": "a.pdf"}}, "image", PNG),
        ({"type": "file", "file": {"file_data": "AA==", "filename": "a.MP3"}}, "audio", "data:;base64,AA=="),
        ({"type": "input_file", "file_data": MP3}, "audio", MP3),
        ({"type": "input_file", "file_url": "https://x/y.mp4?z", "filename": "y.mp4"}, "video", "https://x/y.mp4?z"),
        ({"type": "document", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, "image", PNG),
    ],
)
def test_files(part: dict[str, Any], modality: str, url: str) -> None:
    (message,), ((found, media),) = split(part)
    assert (found, media.data) == (modality, MediaUrl(url))
    assert message["content"] == [{"type": modality, modality: True}]


def test_a_pdf_becomes_its_pages() -> None:
    data = io.BytesIO()
    Image.new("RGB", (9, 9)).save(data, "PDF", save_all=True, append_images=[Image.new("RGB", (5, 5))])
    text = base64.b64encode(data.getvalue()).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": text}
    for part in (
        {"type": "document", "source": source},
        {"type": "file", "file": {"file_data": text, "filename": "a.pdf"}},
        {"type": "input_file", "file_data": f"data:application/pdf;base64,{text}"},
    ):
        (message,), media = split(part)
        assert message["content"] == [{"type": "image", "image": True}] * 2
        assert [(modality, page.data) for modality, page in media] == [
            ("image", PdfPage(data.getvalue(), number)) for number in (1, 2)
        ]
    with pytest.raises(InputError, match="part 0: the PDF has 2 pages, the limit is 1") as caught:
        split_media([{"role": "user", "content": [{"type": "document", "source": source}]}], MediaPolicy(max_pdf_pages=1))
    assert caught.value.info.param == "max_pdf_pages"


def pdf_message(*files: bytes) -> list[dict[str, Any]]:
    parts = [
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{base64.b64encode(file).decode()}"}}
        for file in files
    ]
    return [{"role": "user", "content": [part]} for part in parts]


def test_the_pdfs_of_all_messages_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, left = list[bytes](), list[float]()

    def open_pdf(data: bytes, policy: MediaPolicy, tenant: str | None) -> tuple[PdfFile, float]:
        assert tenant == "a"
        opened.append(data)
        left.append(policy.worker_seconds)
        if policy.worker_seconds < 2.0:
            raise slow_error(policy.worker_seconds)
        return PdfFile(data, ((9.0, 9.0),) * 100), 2.0

    monkeypatch.setattr(pdf, "open_pdf", open_pdf)
    _, media, _ = split_media(pdf_message(b"1", b"2", b"1", b"1", b"1"), tenant="a")
    assert (len(media), opened, left) == (500, [b"1", b"2"], [5.0, 3.0])
    for files, policy, said, param in (
        ([b"1"] * 6, MediaPolicy(), "message 5 part 0: the files of the messages have more than 512 pages", "max_pdf_pages"),
        (
            [b"1"] * 17,
            MediaPolicy(max_pdf_pages=9999),
            "message 16 part 0: the messages hold more than 16 files with pages",
            "messages[16].content[0]",
        ),
        (
            [b"1", b"2", b"3"],
            MediaPolicy(),
            "message 2 part 0: opening the files with pages of the messages took longer than 5 s",
            "worker_seconds",
        ),
        ([b"1", b"2"], MediaPolicy(worker_seconds=3.0), "took longer than 3 s", "worker_seconds"),
        (
            [b"1" * 9, b"2" * 9],
            MediaPolicy(max_request_bytes=13),
            r"message 1 part 0: .*more than 13 bytes",
            "messages[1].content[0]",
        ),
    ):
        with pytest.raises(InputError, match=said) as caught:
            split_media(pdf_message(*files), policy, "a")
        assert caught.value.info.param == param


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "input_file", "file_url": "https://x/a.pdf", "filename": "a.pdf"}, "a PDF is taken as data only"),
        ({"type": "file", "file": {"file_data": "AA==", "filename": "a.pdf"}}, "it is not a PDF"),
        ({"type": "file", "file": {"file_data": "A", "filename": "a.pdf"}}, "valid base64"),
        ({"type": "file", "file": {"file_data": "AA==", "filename": "a.txt"}}, "give it in a part of type text"),
        ({"type": "file", "file": {"file_data": "AA==", "filename": "a.zip"}}, "application/zip; models take images"),
        ({"type": "file", "file": {"file_data": "AA=="}}, "the file has no media type"),
        ({"type": "file", "file": {"file_id": "f"}}, "on OpenAI's servers"),
        ({"type": "file", "file": {"data": PNG}}, "file: unknown field 'data'; .*file_data"),
        ({"type": "file", "file": PNG}, "file must be an object"),
        ({"type": "file"}, "file must be an object .* not None"),
        ({"type": "file", "file": {"filename": "a.png"}}, "file needs file_data"),
        ({"type": "file", "file": {"file_data": PNG}, "detail": "low"}, "unknown field 'detail'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "file_id names a file"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "data of source must be a string"),
        ({"type": "image", "source": {"type": "content"}}, "the type of source must be base64 or url"),
        ({"type": "document", "source": "x"}, "source must be an object"),
        ({"type": "tool_result", "content": "x"}, 'messages with the role "tool"'),
        ({"type": "tool_use", "input": {}}, 'as the "tool_calls" of a message'),
    ],
)
def test_refusals(part: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"^message 0 part 0: .*{said}"):
        split(part)


def tiff_url(*colors: str) -> str:
    first, *others = [Image.new("RGB", (8, 8), color) for color in colors]
    buffer = io.BytesIO()
    first.save(buffer, "TIFF", save_all=True, append_images=others)
    return f"data:image/tiff;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def test_only_files_with_several_pages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "MAX_PDFS", 2)
    single = [{"type": "image_url", "image_url": {"url": tiff_url(color)}} for color in ("red", "green", "blue", "white")]
    single.append({"type": "file", "file": {"file_data": tiff_url("black")}})
    several = [{"type": "image_url", "image_url": {"url": tiff_url("red", color)}} for color in ("green", "blue", "white")]
    policy = MediaPolicy(max_pdf_pages=4)
    _, media, _ = split_media([{"role": "user", "content": [*single, *several[:2], *single]}], policy)
    assert len(media) == 5 + 4 + 5
    with pytest.raises(InputError) as caught:
        split_media([{"role": "user", "content": [*single, *several]}], policy)
    assert (caught.value.info.code, caught.value.info.param) == ("over_limit", "messages[0].content[7]")
