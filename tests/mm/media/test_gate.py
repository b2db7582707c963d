"""The gate of media: errors name their item, and headers agree with decoded items."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
import soundfile
from clips import clip
from PIL import Image
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import gate, image
from sensorium.mm.media.policy import DecodeSpec, FrameFiles, MediaPolicy, MediaUrl
from sensorium.mm.media.video_pyav import index_video
from sensorium.mm.parse import MediaSource

SPEC, POLICY = DecodeSpec(), MediaPolicy()
DATA: dict[str, object] = {
    "image": np.zeros((6, 4, 3), np.uint8),
    "video": np.zeros((3, 6, 4, 3), np.uint8),
    "audio": (np.zeros(800, np.float32), 8000),
}


def source(kind: str, data: object, index: int = 0) -> MediaSource:
    return MediaSource(modality=kind, index=index, kind=kind, data=data)


@pytest.mark.parametrize("kind", DATA)
def test_headers_agree_with_decoded_items(kind):
    given = source(kind, DATA[kind])
    assert [item.header for item in gate.decode(given, SPEC, POLICY)] == gate.probe(given, SPEC, POLICY)
    assert len(gate.content_hash(given, POLICY)) == 64


def test_hashes_depend_on_the_modality():
    pixels = np.zeros((6, 4, 3), np.uint8)
    assert gate.content_hash(source("image", pixels), POLICY) != gate.content_hash(source("video", pixels[None]), POLICY)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("step", [gate.probe, gate.decode])
def test_a_broken_item_is_named(kind, step):
    with pytest.raises(MediaError, match=f"^{kind} 3: ") as error:
        step(source(kind, b"nonsense", 3), SPEC, POLICY)
    assert (error.value.info.modality, error.value.info.index) == (kind, 3)
    assert "\n" not in str(error.value)


def test_an_unreadable_item_is_named(tmp_path):
    with pytest.raises(MediaError, match=r"^image 2: .*No such file"):
        gate.load(source("image", tmp_path / "none.png", 2), POLICY)
    with pytest.raises(MediaError, match=r"^video 1: files named in messages are refused; give the video as bytes"):
        gate.load(source("video", MediaUrl("/etc/passwd"), 1), POLICY)


def test_a_path_is_read_once_and_then_bytes(tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (4, 6)).save(out, "PNG")
    (tmp_path / "a.png").write_bytes(out.getvalue())
    loaded = gate.load(source("image", tmp_path / "a.png"), POLICY)
    assert loaded.data == out.getvalue()
    assert gate.probe(loaded, SPEC, POLICY)[0].size == (6, 4)
    nothing = source("image", None)
    assert gate.load(nothing, POLICY) is nothing


def test_is_remote():
    assert all(gate.is_remote(source("image", url)) for url in ("http://a/x", "HTTPS://a/x", MediaUrl("https://a/x")))
    assert not any(gate.is_remote(source("image", one)) for one in ("a.png", b"http://", MediaUrl("data:,"), DATA["image"]))


def test_slow_formats_are_decoded_in_a_worker() -> None:
    slow, fast = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(slow, "QOI")
    Image.new("RGB", (4, 4), (1, 2, 3)).save(fast, "PNG")
    with mock.patch("sensorium.mm.media.isolate._ask", side_effect=InputError("asked")):
        with pytest.raises(MediaError, match="asked"):
            gate.decode(source("image", slow.getvalue()), SPEC, POLICY)
        [item] = gate.decode(source("image", fast.getvalue()), SPEC, POLICY)
    assert item.pixels[0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF"])
def test_images_of_many_pixels_are_decoded_in_a_worker(form) -> None:
    many, few = io.BytesIO(), io.BytesIO()
    Image.new("1", (8192, 4097)).convert("RGB" if form == "WEBP" else "P").save(many, form)
    Image.new("P", (4096, 512)).save(few, form)
    assert [image.is_slow(file.getvalue(), POLICY) for file in (many, few)] == [True, False]


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
def test_decoding_in_a_thread_ends_by_its_own_time(backend) -> None:
    pytest.importorskip("cv2" if backend == "opencv" else "av")
    policy = MediaPolicy(video_backend=backend, worker_seconds=1e-9)
    late = "decoding it took longer than 1e-09 s; give a shorter or smaller one, or raise worker_seconds"
    with pytest.raises(MediaError, match=late):
        gate.probe(source("video", clip("mpeg4-mp4")), SPEC, policy)
    index = mock.patch("sensorium.mm.media.video.index_video", return_value=index_video(clip("mpeg4-mp4"), POLICY))
    with index, pytest.raises(MediaError, match=late) as error:
        gate.decode(source("video", clip("mpeg4-mp4")), SPEC, policy)
    assert error.value.info.param == "worker_seconds"
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(8000, np.float32), 8000, format="WAV")
    with pytest.raises(MediaError, match=late):
        gate.decode(source("audio", sound.getvalue()), SPEC, policy)


def test_workers_are_those_of_the_tenant() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    policy = MediaPolicy(decode_isolation="process")
    for step in (gate.probe, gate.decode):
        with mock.patch("sensorium.mm.media.isolate._ask", side_effect=InputError("asked")) as ask, pytest.raises(MediaError):
            step(source("image", file.getvalue()), SPEC, policy, "someone")
        assert "someone" in ask.call_args.args


def test_a_list_of_frame_files_is_one_video(monkeypatch) -> None:
    def png(shade: int, size: tuple[int, int] = (4, 6)) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", size, (shade, 0, 0)).save(file, "PNG")
        return file.getvalue()

    def video(*frames: bytes, fps: float = 2.0) -> MediaSource:
        return source("video", ([*frames], {"fps": fps, "do_sample_frames": False}))

    given = video(png(1), png(2), png(3))
    (header,), (item,) = gate.probe(given, SPEC, POLICY), gate.decode(given, SPEC, POLICY)
    assert item.header == header
    assert item.frames[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert item.plan.timestamps == (0.0, 0.5, 1.0)
    assert len({gate.content_hash(one, POLICY) for one in (given, video(png(1)), video(png(1), fps=1.0))}) == 3
    with pytest.raises(MediaError, match=r"^video 0: the frames of one video have different sizes"):
        gate.probe(video(png(1), png(1, (8, 8))), SPEC, POLICY)
    with pytest.raises(MediaError, match=r"^video 0: 3 frames are 216 bytes, the limit is 100"):
        gate.probe(given, SPEC, MediaPolicy(max_video_bytes=100))
    isolated = MediaPolicy(decode_isolation="process")
    for step in (gate.probe, gate.decode):
        with mock.patch("sensorium.mm.media.isolate._ask", side_effect=InputError("asked")) as ask, pytest.raises(MediaError):
            step(given, SPEC, isolated, "someone")
        assert "someone" in ask.call_args.args
    monkeypatch.setattr(image, "decode_image", None)
    gate.content_hash(given, isolated)  # decodes nothing


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_frame_files_are_sampled_and_share_one_time_limit(isolation: str, monkeypatch) -> None:
    left, now, decode = list[float](), [0.0], image.decode_image

    def slow(data, policy):
        left.append(policy.worker_seconds)
        now[0] += 20.0
        return decode(data, policy)

    file = io.BytesIO()
    Image.new("RGB", (4, 6)).save(file, "PNG")
    given = source("video", ([file.getvalue()] * 8, {"fps": 2.0}))
    two, three = (DecodeSpec(sampling=FrameSampling(num_frames=n)) for n in (2, 3))
    policy = MediaPolicy(decode_isolation=isolation, worker_seconds=50.0)
    monkeypatch.setattr("sensorium.mm.media.isolate.run_isolated", lambda function, data, policy, **_: function(data, policy))
    monkeypatch.setattr(image, "decode_image", slow)
    monkeypatch.setattr("time.thread_time", lambda: now[0])
    (item,) = gate.decode(given, two, policy)
    assert item.frames.shape == (2, 6, 4, 3)
    assert left == ([50.0, 30.0] if isolation == "process" else [50.0, 50.0])
    with pytest.raises(MediaError, match=r"^video 0: decoding it took longer than 50 s"):
        gate.decode(given, three, policy)


def test_frames_at_urls_are_remote() -> None:
    assert gate.is_remote(source("video", FrameFiles((MediaUrl("a.png"), MediaUrl("https://x/b.png")), 2.0)))
    assert not gate.is_remote(source("video", FrameFiles((MediaUrl("a.png"),), 2.0)))
