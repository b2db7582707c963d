"""Parts of messages: types, order, uuids and options; errors give the numbers of message and part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.media.policy import FrameFiles, MediaUrl
from sensorium.mm.types import Media
from sensorium.processors.text.message_parts import split_media

PICTURE = Image.new("RGB", (4, 4))
SOUND = np.zeros(8, np.float32)
ROWS = {"image_embeds": SOUND, "image_grid_thw": [1, 2, 2]}
DATA = "data:image/png;base64,AA=="


def split(*parts: object) -> tuple[list[object], list[tuple[str, Media]]]:
    (message,), media, _ = split_media([{"role": "user", "content": list(parts)}])
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
    # the forms of others: transformers, OpenAI's Responses, vLLM, qwen-vl-utils, datasets
    *(({"type": "image", key: DATA}, "image", Media(MediaUrl(DATA))) for key in ("url", "path", "image_url", "base64")),
    ({"type": "image", "base64": "AA=="}, "image", Media(MediaUrl("data:;base64,AA=="))),
    ({"type": "image", "path": Path("a.png")}, "image", Media(Path("a.png"))),
    ({"type": "video", "url": "http://x/y.mp4"}, "video", Media(MediaUrl("http://x/y.mp4"))),
    ({"type": "video", "path": "/etc/passwd"}, "video", Media(MediaUrl("/etc/passwd"))),
    ({"type": "audio", "url": "http://x/y.wav"}, "audio", Media(MediaUrl("http://x/y.wav"))),
    ({"type": "audio", "path": "/etc/passwd"}, "audio", Media(MediaUrl("/etc/passwd"))),
    ({"type": "image_url", "image_url": "http://x/y.png"}, "image", Media(MediaUrl("http://x/y.png"))),
    ({"type": "audio_url", "audio_url": "a.wav"}, "audio", Media(MediaUrl("a.wav"))),
    ({"type": "input_image", "image_url": DATA, "detail": "low"}, "image", Media(MediaUrl(DATA), detail="low")),
    ({"type": "image_pil", "image_pil": PICTURE}, "image", Media(PICTURE)),
    ({"type": "image_embeds", "image_embeds": ROWS}, "image", Media(ROWS)),
    ({"type": "video_embeds", "video_embeds": None, "uuid": "v"}, "video", Media(None, "v")),
    ({"type": "audio_embeds", "audio_embeds": ROWS}, "audio", Media(ROWS)),
    ({"image_url": DATA}, "image", Media(MediaUrl(DATA))),
    ({"image": PICTURE, "min_pixels": 9}, "image", Media(PICTURE, min_pixels=9)),
    ({"type": None, "input_audio": {"data": "AA", "format": "wav"}}, "audio", Media(MediaUrl("data:audio/wav;base64,AA"))),
    ({"type": "image", "image": PICTURE, "text": None, "video": None, "uuid": None, "fps": None}, "image", Media(PICTURE)),
    ({"type": "image", "image": PICTURE, "cache_control": {"type": "ephemeral"}}, "image", Media(PICTURE)),
    (
        {"type": "image", "image": PICTURE, "resized_height": 28, "resized_width": 56},
        "image",
        Media(PICTURE, resized_height=28, resized_width=56),
    ),
    ({"type": "video", "video": b"v", "nframes": 4}, "video", Media(b"v", num_frames=4)),
    (
        {"type": "video", "video": b"v", "video_start": 0, "video_end": 2.5},
        "video",
        Media(b"v", video_start=0, video_end=2.5),
    ),
    (
        {"type": "video", "video": b"v", "fps": 1.0, "min_frames": 4, "max_frames": 8, "total_pixels": 99},
        "video",
        Media(b"v", fps=1.0, min_frames=4, max_frames=8, total_pixels=99),
    ),
    ({"type": "video", "video": [DATA, "file:///b"]}, "video", Media(FrameFiles((MediaUrl(DATA), MediaUrl("file:///b")), 2.0))),
    ({"type": "video", "video": ["a", Path("b")], "fps": 1}, "video", Media(FrameFiles((MediaUrl("a"), Path("b")), 1.0))),
    (
        {"type": "video", "video": [PICTURE], "sample_fps": 4.0},
        "video",
        Media(([PICTURE], {"fps": 4.0, "do_sample_frames": False})),
    ),
    ({"type": "image", "image": {"bytes": b"abc", "path": "a.png"}}, "image", Media(b"abc")),
    ({"type": "image", "image": {"bytes": None, "path": "/etc/passwd"}}, "image", Media(MediaUrl("/etc/passwd"))),
]


@pytest.mark.parametrize(
    "part",
    [
        "hello",
        {"text": "hello"},
        {"type": "text", "text": "hello", "image": None, "video_url": None, "max_pixels": None},
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "hello"},
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": None},
        {"type": "refusal", "refusal": "hello"},
        {"refusal": "hello"},
        {"type": "thinking", "thinking": "hello", "closed": True, "signature": "x"},
    ],
)
def test_text_in_the_forms_of_other_libraries(part: object) -> None:
    assert split(part) == ([{"type": "text", "text": "hello"}], [])


def test_a_data_sets_audio() -> None:
    _, ((modality, media),) = split({"type": "audio", "audio": {"array": SOUND, "sampling_rate": 8000, "path": "/etc/passwd"}})
    samples, rate = media.data
    assert (modality, rate) == ("audio", 8000)
    assert samples is SOUND


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
    messages, media, _ = split_media([{"role": "user", "content": parts[:8]}, {"role": "user", "content": parts[8:]}])
    shown = [part for message in messages for part in message["content"]]
    assert [part["type"] for part in shown[::2]] == [modality for modality, _ in media] == [form[1] for form in FORMS]
    assert all(part == {"type": "text", "text": "t"} for part in shown[1::2])


KNOWN = "the known ones are text, refusal, input_text, output_text, thinking, image, image_url, "
URL = {"url": DATA}
REFUSED = [
    ({"type": "image_url", "image_url": 3}, r'image_url must be a URL or an object \{"url": "data:..."\}; not an int'),
    ({"type": "image_url", "image_url": {}}, "its 'url' is None"),
    ({"type": "image_url", "image_url": {"url": 3}}, "its 'url' is an int"),
    ({"type": "image_url", "image_url": {**URL, "uuid": "x"}}, "give uuid beside image_url, not inside it"),
    ({"type": "image_url", "image_url": {**URL, "detial": "low"}}, "image_url: unknown field 'detial'; did you mean detail?"),
    ({"type": "image_url", "image_url": {**URL, "detail": "medium"}}, "detail is 'medium'; give low, high, auto or original"),
    ({"type": "image_url", "image_url": {**URL, "detail": np.zeros(2)}}, "give low, high, auto or original"),
    ({"type": "image_url", "image_url": None}, "image_url is missing; give its data, or the uuid"),
    ({"type": "image", "image": None}, "image is missing"),
    ({"type": "image"}, "image is missing; give its data"),
    ({"type": "image", "url": DATA, "image": DATA}, "image and url both hold the image; give one of them"),
    ({"type": "image_embeds", "image_embeds": "gASV"}, "image_embeds must be a tensor of encoder rows; a serialised tensor"),
    ({"type": "image", "base64": b"AA"}, "base64 must be base64 text, not a bytes"),
    ({"type": "image", "image": {"url": DATA}}, 'image contains text; give a URL alone, or in a part {"type": "image_url"}'),
    ({"type": "video", "video": ["a.png", PICTURE]}, "video contains text"),
    ({"type": "video", "video": ["a.png"] * 5000}, "video has 5,000 files, the limit is 4,096"),
    ({"type": "video", "video": b"", "sample_fps": 2}, "sample_fps is the rate of a list of frames; for a file, give fps"),
    ({"type": "video", "video": b"", "nframes": 2, "fps": 2}, "fps and num_frames exclude each other"),
    ({"type": "video", "video": b"", "nframes": 2, "num_frames": 2}, "nframes and num_frames exclude each other"),
    ({"type": "video", "video": b"", "video_start": -1}, "video_start is -1; give seconds, 0 or above"),
    ({"type": "video", "video": b"", "video_start": True}, "video_start is True"),
    ({"type": "video", "video": b"", "video_end": 0}, "video_end is 0; give a positive number of seconds"),
    ({"type": "image", "image": PICTURE, "video_end": 1}, "unknown field 'video_end'"),
    ({"type": "input_image", "file_id": "x"}, "unknown field 'file_id'"),
    ({"type": "image", "image": Media(PICTURE)}, "image must be plain data"),
    ({"type": "image", "image": PICTURE, "uuid": ""}, "uuid is ''; give a non-empty string"),
    ({"type": "image", "image": PICTURE, "uuid": 3}, "uuid is 3; give a non-empty string"),
    ({"type": "image", "image": PICTURE, "max_pixel": 3}, "unknown field 'max_pixel'; did you mean max_pixels?"),
    ({"type": "image", "image": PICTURE, "max_pixels": 0}, "max_pixels is 0; give a positive integer"),
    ({"type": "image", "image": PICTURE, "max_pixels": True}, "max_pixels is True"),
    ({"type": "image", "image": PICTURE, "min_pixels": 1.5}, "min_pixels is 1.5"),
    ({"type": "image", "image": PICTURE, "fps": 1}, "unknown field 'fps'"),
    ({"type": "video", "video": b"", "fps": float("nan")}, "fps is nan; give a positive number"),
    ({"type": "video", "video": b"", "fps": "2"}, "fps is '2'"),
    ({"type": "video", "video": ["a"], "fps": 10**400}, "fps is 0x"),
    (
        {"type": "audio", "audio": {"array": [[1.0], [1.0, 2.0]], "sampling_rate": 8000}},
        "its array is not a regular array of numbers",
    ),
    ({"type": "video", "video": b"", "num_frames": 0}, "num_frames is 0; give a positive integer, or -1"),
    ({"type": "video", "video": b"", "num_frames": 2, "fps": 2}, "fps and num_frames exclude each other"),
    ({"type": "audio", "image_url": "a.wav"}, "unknown field 'image_url'; the known ones are type, audio,"),
    ({"type": "audio", "audio": b"", "detail": "low"}, "unknown field 'detail'"),
    ({"type": "input_audio", "input_audio": "AAAA"}, r'input_audio must be an object \{"data": "<base64>", "format": "wav"\}'),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "a format such as 'wav'"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav,"}}, "a format such as 'wav'"),
    (
        {"type": "input_audio", "input_audio": {"data": b"AAAA", "format": "wav"}},
        "'data' of input_audio must be base64 text",
    ),
    ({"type": "sound", "sound": 1}, f"unknown part type 'sound'; {KNOWN}"),
    ({"type": ["text"]}, "unknown part type"),
    ({"url": "x"}, f"a part needs a type; {KNOWN}"),
    ({"text": "x", "image": PICTURE}, "a part with text and image needs a type"),
    (7, "a part must be an object or a string, not an int"),
    (PICTURE, r'not an Image; put the item into an object such as \{"type": "image", "image": item\}'),
    ({"type": "text"}, "text must be a string, not None"),
    ({"type": "text", "text": "x", "image": PICTURE}, "unknown field 'image'"),
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
        ("hello", "give an object with content and a role, .*, not a str; a list of prompts goes to LLM.generate"),
    ],
)
def test_refusals_name_the_message(message: object, text: str) -> None:
    with pytest.raises(InputError, match=f"^message 0: .*{text}"):
        split_media([message])  # type: ignore[list-item]
