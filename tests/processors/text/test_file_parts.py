"""Parts of messages that hold files, in the forms of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import pytest
from sensorium.mm.errors import InputError
from sensorium.mm.media.policy import MediaUrl
from sensorium.processors.text.message_parts import split_media

PNG, MP3 = "data:image/png;base64,AA==", "data:audio/mpeg;base64,AA=="


def split(part: Any) -> Any:
    return split_media([{"role": "user", "content": [part]}])


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


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}}, "'a.pdf' is a PDF"),
        ({"type": "file", "file": {"file_data": "AA==", "filename": "a.pdf"}}, "give its pages as images"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}, "title": "T"},
            "'T' is a PDF",
        ),
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
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "data of source must be a text"),
        ({"type": "image", "source": {"type": "content"}}, "the type of source must be base64 or url"),
        ({"type": "document", "source": "x"}, "source must be an object"),
        ({"type": "tool_result", "content": "x"}, 'messages with the role "tool"'),
        ({"type": "tool_use", "input": {}}, 'as the "tool_calls" of a message'),
    ],
)
def test_refusals(part: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"^message 0 part 0: .*{said}"):
        split(part)
