"""Videos in containers and codecs beside the usual ones, compared with plain PyAV or Pillow."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from clips import encode, plainly
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import gate, isolate, video
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.media.video import decode_video, probe_video
from sensorium.mm.parse import MediaSource

ALL = FrameSampling(num_frames=-1)
FORMATS = [  # codec, container, pixels
    ("mpeg2video", "vob", "yuv420p"),
    ("mpeg1video", "mpeg", "yuv420p"),
    ("mpeg2video", "mpeg2video", "yuv420p"),
    ("flv", "flv", "yuv420p"),
    ("wmv2", "asf", "yuv420p"),
    ("mpeg4", "nut", "yuv420p"),
    ("mpeg4", "m4v", "yuv420p"),
    ("mpeg2video", "wtv", "yuv420p"),
    ("mjpeg", "mjpeg", "yuvj420p"),
    ("libvpx", "ivf", "yuv420p"),
    ("apng", "apng", "rgb24"),
    ("qtrle", "mov", "rgb24"),
    ("cfhd", "mov", "yuv422p10le"),
    ("msvideo1", "avi", "rgb555le"),
    ("zmbv", "avi", "bgr0"),
    ("huffyuv", "avi", "yuv422p"),
    ("magicyuv", "avi", "gbrp"),
    ("asv1", "avi", "yuv420p"),
]


def made(codec: str, container: str, pixels: str) -> bytes:
    if codec not in av.codecs_available or container not in av.formats_available:
        pytest.skip(f"this PyAV has no {codec} or {container}")
    buffer, noise = io.BytesIO(), np.random.default_rng(1)
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 64, pixels
        for _ in range(12):
            frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (64, 64, 3), dtype=np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("codec", "container", "pixels"), FORMATS)
def test_frames_are_those_of_plain_pyav(codec: str, container: str, pixels: str) -> None:
    data = made(codec, container, pixels)
    if container == "mjpeg":  # plain PyAV takes it for an image
        with av.open(io.BytesIO(data), format="mjpeg") as opened:
            expected = np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])
    else:
        expected, _ = plainly(data)
    item = decode_video(data, ALL, MediaPolicy())
    assert len(expected) == 12
    assert np.array_equal(item.frames.numpy(), expected)
    assert probe_video(data, ALL, MediaPolicy()).frames == item.plan
    with pytest.raises(InputError, match=r"over the limit of 4,000 pixels|it has no pixels"):  # some sizes are decoded first
        probe_video(data, ALL, MediaPolicy(max_pixels=4000))


def webp(durations: list[int], transparent: bool = False) -> bytes:
    noise, buffer = np.random.default_rng(2), io.BytesIO()
    shape = (20, 30, 4 if transparent else 3)
    first, *others = [Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)) for _ in durations]
    first.save(buffer, "WEBP", save_all=True, append_images=others, duration=durations, lossless=True)
    return buffer.getvalue()


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
def test_an_animated_webp_is_a_video(backend: str) -> None:
    data = webp([100, 300, 50, 150])
    item = decode_video(data, ALL, MediaPolicy(video_backend=backend))
    with Image.open(io.BytesIO(data)) as image:
        for number in range(4):
            image.seek(number)
            assert np.array_equal(item.frames[number].numpy(), np.asarray(image.convert("RGB")))
    assert item.plan.timestamps == pytest.approx([0.0, 0.1, 0.4, 0.45])
    assert item.plan.fps == pytest.approx(4 / 0.6)
    two = decode_video(data, FrameSampling(num_frames=2), MediaPolicy(video_backend=backend))
    assert two.plan.indices == (0, 2)
    assert np.array_equal(two.frames.numpy(), item.frames[[0, 2]].numpy())
    with pytest.raises(InputError, match="over the limit of 500 pixels"):
        probe_video(data, ALL, MediaPolicy(max_pixels=500))


def test_transparent_frames_get_the_background() -> None:
    data = webp([100, 100], transparent=True)
    black, white = (decode_video(data, ALL, MediaPolicy(background=color)).frames for color in ((0, 0, 0), (255, 255, 255)))
    assert (black <= white).all()
    assert (black < white).any()


def test_the_hash_of_an_animated_webp_depends_on_the_background() -> None:
    white, red = MediaPolicy(), MediaPolicy(background=(255, 0, 0))
    source = MediaSource("video", 0, webp([100, 100], transparent=True))
    assert gate.content_hash(source, white) == gate.content_hash(source, MediaPolicy()) != gate.content_hash(source, red)
    plain = MediaSource("video", 0, b"no animation")
    assert gate.content_hash(plain, white) == gate.content_hash(plain, red)


def test_an_animated_webp_is_decoded_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(isolate, "_ask", lambda request, *_: asked.append(request.name) or 1 / 0)
    for step in (gate.probe, gate.decode):
        with pytest.raises(Exception, match="division"):
            step(MediaSource("video", 0, webp([100, 100])), DecodeSpec(), MediaPolicy())
    assert asked == ["probe_video", "decode_video"]


def test_a_broken_webp_is_refused() -> None:
    data = webp([100, 100, 100])
    for broken in (data[:60], data[:-20]):
        with pytest.raises(InputError, match="broken or cut off"):
            decode_video(broken, ALL, MediaPolicy())


def test_what_opencv_cannot_read_is_read_by_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode("libx264", "mp4", count=3)
    expected = decode_video(data, ALL, MediaPolicy()).frames
    monkeypatch.setitem(video.READERS, "opencv", lambda *_: iter(()))
    assert np.array_equal(decode_video(data, ALL, MediaPolicy(video_backend="opencv")).frames.numpy(), expected.numpy())


def test_an_image_and_still_images_in_a_video_are_refused() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    with pytest.raises(InputError, match="it is an image"):
        probe_video(buffer.getvalue(), ALL, MediaPolicy())
    with pytest.raises(InputError, match="its codec png is not supported"):
        probe_video(made("png", "mov", "rgb24"), ALL, MediaPolicy())
