"""Files in a wrong format: errors say what the file is and what to do."""

from __future__ import annotations

import io

import pytest
import soundfile
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.media import gate
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource

PNG, WAV = io.BytesIO(), io.BytesIO()
Image.new("RGB", (4, 4)).save(PNG, "PNG")
soundfile.write(WAV, [0.0] * 100, 8000, format="WAV")


@pytest.mark.parametrize(
    ("modality", "data", "said"),
    [
        (
            "image",
            b"%PDF-1.7\n%...",
            r"it is a PDF, not in a supported image format; give sensorium.pdf_pages\(file\) in Python, or the file in a part",
        ),
        ("image", b'<?xml version="1.0"?>\n<svg xmlns="x">', "it is an SVG, .*; render it as PNG first"),
        ("image", b"\n<!DOCTYPE html><html>", "it is an HTML page, .*; give the address of the file itself"),
        ("image", b"\0\0\0\x18ftypheic\0\0", "(it is a HEIC image, .*; or convert it to JPEG|it begins as a HEIC image)"),
        (
            "image",
            b"version https://git-lfs.github.com/spec/v1\noid",
            "it is a Git LFS pointer, .*; download the file itself",
        ),
        ("image", b"PK\3\4....", "it is a ZIP archive"),
        ("image", b"\0\0\0\x18ftypisom\0\0", "it is a video, .*; give it as a video"),
        ("image", WAV.getvalue(), "it is audio, .*; give it as audio"),
        ("image", b"<" * 600, "it is not in a supported image format; convert it to PNG or JPEG"),
        ("video", PNG.getvalue(), "it is an image, not in a supported video format; give it as an image"),
        ("video", b"%PDF-1.7\n", "it is a PDF, not in a supported video format"),
        ("video", b"\0\0\0\x18ftypisom\0\0", "it begins as a video, but is broken or cut off; download or export it again"),
        ("image", b"\x89PNG\r\n", "it begins as an image, but is broken or cut off"),
        ("audio", b"RIFF\0\0\0\0WAVE", "it begins as audio, but is broken or cut off"),
        ("audio", b"%PDF-1.7\n", "it is a PDF, not in a supported audio format"),
        ("audio", b"\0\1\2\3" * 100, r"give raw PCM as \(np.frombuffer\(data, np.int16\), rate\)"),
    ],
)
def test_files_in_a_wrong_format(modality: str, data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=f"^{modality} 0: .*{said}"):
        gate.probe(MediaSource(modality, 0, data), DecodeSpec(), MediaPolicy())
