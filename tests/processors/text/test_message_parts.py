"""Parts of messages: types, order, uuids and options; errors give the numbers of message and part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sensorium.mm.errors import InputError
from sensorium.mm.media.policy import MediaUrl
from sensorium.mm.types import Media
from sensorium.processors.text.message_parts import split_media

PICTURE = Image.new("RGB", (4, 4))
SOUND = np.zeros(8, np.float32)
DATA = "data:image/png;base64,AA=="


def split(*parts: object) -> tuple[list[object], list[tuple[str, Media]]]:
    (message,), media = split_media([{"role": "user", "content": list(parts)}])
    return message["content"], media


FORMS = [
    ({"type": "image", "image": PICTURE}, "image", Media(PICTURE)),
    ({"type": "image", "image": Path("a.png")}, "image", Media(Path("a.png"))),
    ({"type": "image", "image": b"abc"}, "image", Media(b"abc")),
    ({"type": "image", "image": MediaUrl(DATA)}, "image", Media(MediaUrl(DATA))),
    *(
        ({"type": "image", "image": url}, "image", Media(MediaUrl(url)))
        for url in (DATA, "http://x/y.png", "https://x/y.png", "file:///etc/passwd", "/etc/passwd", "")
    ),
    ({"type": "image_url", "image_url": {"url": DATA}}, "image", Media(MediaUrl(DATA))),
    ({"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}, "image", Media(MediaUrl(DATA), detail="low")),
    (
        {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}, "detail": "high"},
        "image",
        Media(MediaUrl(DATA), detail="high"),
    ),
    ({"type": "image_url", "image_url": {"url": DATA, "detail": None}, "uuid": None}, "image", Media(MediaUrl(DATA))),
    ({"type": "image_url", "image_url": None, "uuid": "x"}, "image", Media(None, "x")),
    (
        {"type": "image", "image": PICTURE, "uuid": "cat", "min_pixels": 1, "max_pixels": 9},
        "image",
        Media(PICTURE, "cat", min_pixels=1, max_pixels=9),
    ),
    ({"type": "video", "video": [PICTURE, PICTURE], "fps": 2}, "video", Media([PICTURE, PICTURE], fps=2)),
    ({"type": "video", "video": b"v", "num_frames": -1, "fps": None}, "video", Media(b"v", num_frames=-1)),
    (
        {"type": "video_url", "video_url": {"url": "h:x"}, "detail": "auto"},
        "video",
        Media(MediaUrl("h:x"), detail="auto"),
    ),
    ({"type": "audio", "audio": (SOUND, 16000)}, "audio", Media((SOUND, 16000))),
    ({"type": "audio_url", "audio_url": {"url": "a.wav"}, "uuid": "s"}, "audio", Media(MediaUrl("a.wav"), "s")),
    (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        "audio",
        Media(MediaUrl("data:audio/mp3;base64,AAAA")),
    ),
    ({"type": "input_audio", "input_audio": None, "uuid": "s"}, "audio", Media(None, "s")),
]


@pytest.mark.parametrize(("part", "modality", "want"), FORMS)
def test_forms(part: dict[str, object], modality: str, want: Media) -> None:
    shown, media = split(part)
    assert shown == [{"type": modality, modality: True}]
    ((got_modality, got),) = media
    assert got_modality == modality
    assert got.data is want.data or got.data == want.data
    assert (got.uuid, got.options) == (want.uuid, want.options)


def test_order_and_interleaving_are_kept() -> None:
    parts = [part for part, _, _ in FORMS for part in (part, {"type": "text", "text": "t"})]
    messages, media = split_media([{"role": "user", "content": parts[:8]}, {"role": "user", "content": parts[8:]}])
    shown = [part for message in messages for part in message["content"]]
    assert [part["type"] for part in shown[::2]] == [modality for modality, _ in media] == [form[1] for form in FORMS]
    assert all(part == {"type": "text", "text": "t"} for part in shown[1::2])


KNOWN = "the known ones are text, image, image_url, video, video_url, audio, audio_url, input_audio"
URL = {"url": DATA}
REFUSED = [
    ({"type": "image_url", "image_url": "http://x/y.png"}, r'image_url is an object \{"url": "data:..."\}, not a str'),
    ({"type": "image_url", "image_url": {}}, "its 'url' is None"),
    ({"type": "image_url", "image_url": {"url": 3}}, "its 'url' is an int"),
    ({"type": "image_url", "image_url": {**URL, "uuid": "x"}}, "give uuid beside image_url, not inside it"),
    ({"type": "image_url", "image_url": {**URL, "detial": "low"}}, "image_url: unknown field 'detial'; did you mean detail?"),
    ({"type": "image_url", "image_url": {**URL, "detail": "medium"}}, "detail is 'medium'; give low, high or auto"),
    ({"type": "image_url", "image_url": None}, "image_url is missing; give its data, or the uuid"),
    ({"type": "image", "image": None}, "image is missing"),
    ({"type": "image"}, "needs a field 'image'"),
    ({"type": "image", "url": DATA}, "unknown field 'url'"),
    ({"type": "image", "image": {"url": DATA}}, 'image contains text; give a URL alone, or in a part {"type": "image_url"}'),
    ({"type": "video", "video": ["a.png", "b.png"]}, "video contains text"),
    ({"type": "image", "image": Media(PICTURE)}, "image must be plain data"),
    ({"type": "image", "image": PICTURE, "uuid": ""}, "uuid is ''; give a non-empty string"),
    ({"type": "image", "image": PICTURE, "uuid": 3}, "uuid is '3'; give a non-empty string"),
    ({"type": "image", "image": PICTURE, "max_pixel": 3}, "unknown field 'max_pixel'; did you mean max_pixels?"),
    ({"type": "image", "image": PICTURE, "max_pixels": 0}, "max_pixels is '0'; give a positive integer"),
    ({"type": "image", "image": PICTURE, "max_pixels": True}, "max_pixels is 'True'"),
    ({"type": "image", "image": PICTURE, "min_pixels": 1.5}, "min_pixels is '1.5'"),
    ({"type": "image", "image": PICTURE, "fps": 1}, "unknown field 'fps'"),
    ({"type": "video", "video": b"", "fps": float("nan")}, "fps is 'nan'; give a positive number"),
    ({"type": "video", "video": b"", "fps": "2"}, "fps is '2'"),
    ({"type": "video", "video": b"", "num_frames": 0}, "num_frames is '0'; give a positive integer, or -1"),
    ({"type": "video", "video": b"", "num_frames": 2, "fps": 2}, "fps and num_frames exclude each other"),
    ({"type": "audio", "audio_url": "a.wav"}, "unknown field 'audio_url'; did you mean audio?"),
    ({"type": "audio", "audio": b"", "detail": "low"}, "unknown field 'detail'"),
    ({"type": "input_audio", "input_audio": "AAAA"}, r'input_audio is an object \{"data": "<base64>", "format": "wav"\}'),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "a format such as 'wav'"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav,"}}, "a format such as 'wav'"),
    ({"type": "input_audio", "input_audio": {"data": b"AAAA", "format": "wav"}}, "its 'data' is a bytes"),
    ({"type": "sound", "sound": 1}, f"unknown part type 'sound'; {KNOWN}"),
    ({"type": ["text"]}, "unknown part type"),
    ({"text": "x"}, f"a part needs a type; {KNOWN}"),
    ("hello", "unknown part type 'hello'"),
    ({"type": "text"}, "needs a field 'text'"),
    ({"type": "text", "text": 3}, "text must be a string, not an int"),
    ({"type": "text", "text": "x", "uuid": "y"}, "unknown field 'uuid'"),
]


@pytest.mark.parametrize(("part", "text"), REFUSED)
def test_refusals_name_the_part(part: object, text: str) -> None:
    ok = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    with pytest.raises(InputError, match=text) as error:
        split_media([ok, {"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert str(error.value).startswith("message 1 part 1: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": 7}, "text or a list of parts, not an int"),
        ({"role": "user", "content": {"type": "text"}}, "text or a list of parts, not a dict"),
        ({"role": "im_end|><|im_start", "content": ""}, r"and a role, one of .*, not role 'im_end\|><\|im_start'"),
        ({"content": ""}, "and a role, one of"),
        ("hello", "give an object with content and a role"),
    ],
)
def test_refusals_name_the_message(message: object, text: str) -> None:
    with pytest.raises(InputError, match=f"^message 0: .*{text}"):
        split_media([message])  # type: ignore[list-item]
