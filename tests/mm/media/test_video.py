"""Videos from files: sampled frames, limits, and damaged or mutated files."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clips import clip, encode
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import video_pyav
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, hash_video, probe_video

POLICY, ALL = MediaPolicy(), FrameSampling()
TWO = FrameSampling(fps=2.0, min_frames=4, max_frames=768, multiple=2)
EIGHT = FrameSampling(num_frames=8, spread="ends")
FRAMES = np.random.default_rng(0).integers(0, 256, (10, 8, 12, 3), dtype=np.uint8)


def test_frames_are_those_of_the_sampling():
    data = clip("mjpeg-avi")
    item = decode_video(data, TWO, POLICY)
    assert item.frames.shape == (8, 64, 64, 3)
    assert item.plan.timestamps == pytest.approx([0.5 * i for i in range(8)])
    assert item.plan.fps == pytest.approx(2.0)
    assert len(decode_video(data, FrameSampling(num_frames=6, multiple=2), POLICY).frames) == 6
    assert decode_video(data, FrameSampling(num_frames=6), POLICY).plan.fps == pytest.approx(1.5)
    assert probe_video(data, FrameSampling(fps=0.1), POLICY).frames.indices == (0,)  # a step longer than the video
    half = probe_video(data, FrameSampling(num_frames=4, max_duration=2.0), POLICY).frames
    assert half.indices == (0, 5, 10, 15)
    assert half.total == 40
    assert half.fps == pytest.approx(2.0)


@pytest.mark.parametrize("spread", ["stride", "middle", "ends", "nearest", "after", "before", "last"])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_a_clip_with_fewer_frames_than_num_frames_is_used_whole(spread, multiple):
    data, sampling = clip("mjpeg-avi"), FrameSampling(num_frames=50, spread=spread, multiple=multiple)
    assert probe_video(data, sampling, POLICY).frames.indices == tuple(range(40))
    item = decode_video(data, sampling, POLICY)
    assert item.plan == decode_video(data, FrameSampling(num_frames=-1), POLICY).plan
    assert item.frames.shape == (40, 64, 64, 3)
    part = replace(sampling, num_frames=25, max_duration=2.0)
    assert probe_video(data, part, POLICY).frames.indices == tuple(range(20))
    cut = replace(sampling, num_frames=25, start=1.0, end=1.5)
    assert probe_video(data, cut, POLICY).frames.indices == tuple(range(10, 16))
    for frames in (np.zeros((7, 8, 8, 3), np.uint8), (np.zeros((7, 8, 8, 3), np.uint8), {"fps": 2.0})):
        assert probe_video(frames, sampling, POLICY).frames.indices == tuple(range(7))


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
def test_a_cut_decodes_its_own_frames_with_the_times_of_the_whole_video(backend):
    data, policy = clip("h264-mp4"), MediaPolicy(video_backend=backend)
    whole = decode_video(data, ALL, policy)
    cut = decode_video(data, FrameSampling(fps=2.0, start=1.0, end=2.95), policy)
    assert cut.plan.indices == (10, 15, 20, 25)
    assert cut.plan.timestamps == pytest.approx((1.0, 1.5, 2.0, 2.5))
    assert (cut.plan.total, cut.plan.fps) == (40, pytest.approx(2.0))
    assert torch.equal(cut.frames, whole.frames[[10, 15, 20, 25]])
    with pytest.raises(InputError, match=r"video_start is 4.5 s, but the video lasts only 4.00 s"):
        probe_video(data, FrameSampling(start=4.5), POLICY)


def damaged(frame: int) -> bytes:
    """Return a video of 26 frames that decode independently, one of them broken."""
    data = encode("mjpeg", "avi", count=26)
    with av.open(io.BytesIO(data)) as container:
        packet = [bytes(p) for p in container.demux(video=0)][frame]
    return data.replace(packet, bytes(len(packet)))


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
def test_a_broken_frame_is_missing_or_replaced(backend, caplog):
    data, whole = damaged(17), decode_video(encode("mjpeg", "avi", count=26), ALL, POLICY)
    with caplog.at_level(logging.WARNING, "sensorium"):
        item = decode_video(data, EIGHT, MediaPolicy(video_backend=backend))
    assert "7 of the 8 sampled frames" in caplog.text
    assert item.plan.indices == (0, 3, 7, 10, 14, 21, 25)
    assert item.plan.missing == (17,)
    assert item.plan.timestamps == pytest.approx([i / 10 for i in item.plan.indices])
    caplog.clear()
    item = decode_video(data, EIGHT, MediaPolicy(video_backend=backend, frame_recovery=True))
    assert not caplog.text
    assert item.plan.indices == (0, 3, 7, 10, 14, 18, 21, 25)
    assert item.plan.replaced == ((17, 18),)
    assert item.plan.missing == ()
    assert item.plan.timestamps == pytest.approx([i / 10 for i in item.plan.indices])
    assert torch.equal(item.frames, whole.frames[list(item.plan.indices)])


def test_a_replacement_comes_before_the_next_sampled_frame():
    item = decode_video(damaged(17), ALL, MediaPolicy(frame_recovery=True))
    assert item.plan.missing == (17,)
    assert item.plan.replaced == ()
    last = decode_video(damaged(25), EIGHT, MediaPolicy(frame_recovery=True))
    assert last.plan.missing == (25,)


def test_damage_does_not_shift_frame_numbers():
    data = bytearray(clip("h264-mp4"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0)]
    for at, size in packets[13:18]:
        data[at : at + size] = bytes(size)
    whole, item = decode_video(clip("h264-mp4"), ALL, POLICY), decode_video(bytes(data), ALL, POLICY)
    assert 0 < len(item.plan.missing) < 12
    assert item.plan.indices[-10:] == tuple(range(30, 40))
    assert torch.equal(item.frames[-10:], whole.frames[-10:])
    assert torch.equal(item.frames[:10], whole.frames[:10])


def test_gaps_in_an_avi_file_are_no_missing_frames(caplog):
    target = io.BytesIO()
    with av.open(target, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height = 64, 48
        for number in range(0, 30, 3):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 8, np.uint8))
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert len(decode_video(target.getvalue(), ALL, POLICY).frames) == 10
    assert not caplog.text


def test_a_truncated_video_gives_its_readable_frames_and_a_warning(caplog):
    data = clip("mjpeg-avi")
    cut = data[: len(data) * 3 // 5]
    header, item = probe_video(cut, ALL, POLICY), decode_video(cut, ALL, POLICY)
    assert f"the file is cut off; it has {header.frames.total} of its 40 frames" in caplog.text
    caplog.clear()
    decode_video(data, ALL, POLICY)
    assert not caplog.text
    assert 15 < header.frames.total < 40
    assert len(item.frames) in (header.frames.total, header.frames.total - 1)
    assert item.plan.timestamps == pytest.approx([0.1 * i for i in range(len(item.frames))])
    with pytest.raises(InputError, match="it begins as a video, but is broken or cut off"):
        decode_video(clip("h264-mp4")[:2000], ALL, POLICY)  # the table of packets is at the end


def test_a_video_without_readable_frames_is_an_error():
    data = encode("mjpeg", "avi", count=3)
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(video=0):
            data = data.replace(bytes(packet), bytes(packet.size)) if packet.size else data
    with pytest.raises(InputError, match=r"no frame can be decoded|no pixels"):
        decode_video(data, ALL, POLICY)


def test_frames_of_another_size_are_left_out(caplog):
    small, large = (encode("libx264", "h264", {"bf": "0"}, count=5, size=size) for size in ((64, 64), (96, 64)))
    with caplog.at_level(logging.WARNING, "sensorium"):
        item = decode_video(small + large, ALL, POLICY)
    assert item.frames.shape == (5, 96, 64, 3)  # the header tells the size of the second half
    assert item.plan.missing == (0, 1, 2, 3, 4)
    assert "5 of the 10" in caplog.text
    with pytest.raises(InputError, match="its header says 64x96 but its frames are 64x64"):
        decode_video(small + large, FrameSampling(num_frames=1), POLICY)


def test_limits_are_checked_before_decoding(monkeypatch):
    monkeypatch.setattr(video_pyav, "_decode", None)
    data = clip("h264-mp4")
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=r"40 frames are 491,520 bytes, the limit is 491,519; lower num_frames or fps"):
            call(data, ALL, MediaPolicy(max_video_bytes=491_519))
        with pytest.raises(InputError, match=r"64x64 is over the limit of 4,095 pixels"):
            call(data, ALL, MediaPolicy(max_pixels=4095))
        with pytest.raises(InputError, match=r"10 frames are 2,880 bytes, the limit is 2,879"):
            call(FRAMES, ALL, MediaPolicy(max_video_bytes=2879))
        with pytest.raises(InputError, match=r"12x8 is over the limit of 95 pixels"):
            call(FRAMES, ALL, MediaPolicy(max_pixels=95))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"not a clip at all", "not in a supported video format"),
        (b"", "it is empty; download or export it again"),
    ],
)
def test_invalid_videos_are_refused_with_the_reason(value, text):
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=text) as error:
            call(value, TWO, POLICY)
        assert "\n" not in str(error.value)


def test_audio_and_images_are_refused_as_videos():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 16000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    with pytest.raises(InputError, match="it holds no video"):
        probe_video(buffer.getvalue(), ALL, POLICY)
    picture = io.BytesIO()
    Image.fromarray(FRAMES[0]).save(picture, "PNG")
    with pytest.raises(InputError, match="not in a supported video format"):
        probe_video(picture.getvalue(), ALL, POLICY)


def test_the_hash_is_that_of_the_encoded_bytes():
    data = clip("h264-mp4")
    assert hash_video(data, MediaPolicy()) == hash_video(bytearray(data), MediaPolicy()) != hash_video(data[:-1], MediaPolicy())


@pytest.mark.parametrize("name", ["h264-mp4", "h264-open-gop-mkv", "vp9-webm", "mjpeg-avi", "h264-ts", "gif"])
def test_mutated_files_give_typed_errors_only(name):
    rng, data = random.Random(name), clip(name)
    policy = MediaPolicy(max_pixels=1 << 16, max_video_bytes=1 << 24)
    for _ in range(25):
        mutant = bytearray(data)
        for _ in range(rng.choice([1, 3, 30])):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        if rng.random() < 0.2:
            del mutant[rng.randrange(len(mutant)) :]
        for sampling in (ALL, EIGHT, TWO):
            with contextlib.suppress(InputError):
                header = probe_video(bytes(mutant), sampling, policy)
                item = decode_video(bytes(mutant), sampling, policy)
                assert item.header.size == header.size
                assert 0 < len(item.frames) == len(item.plan.indices) <= len(header.frames.indices)
                assert set(item.plan.indices) | set(item.plan.missing) == set(header.frames.indices)


@pytest.mark.shared
def test_real_videos(shared_data: Path):
    folder = shared_data / "videos"
    item = decode_video((folder / "three_colours.mp4").read_bytes(), TWO, POLICY)
    assert item.frames.shape == (12, 240, 320, 3)
    assert item.frames.float().mean((1, 2)).argmax(1).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert item.plan.timestamps[:4] == pytest.approx([0, 0.48, 1.0, 1.48])
    cut = decode_video((folder / "truncated.mp4").read_bytes(), ALL, POLICY)  # it claims 150 frames
    assert len(cut.frames) == cut.plan.total == 84
    broken = (folder / "corrupt_midfile.mp4").read_bytes()
    item = decode_video(broken, ALL, POLICY)
    assert len(item.frames) == 48
    assert item.plan.total == 58
    assert len(item.plan.missing) == 10
    assert torch.equal(decode_video(broken, ALL, MediaPolicy(video_backend="opencv")).frames, item.frames)
    whole = decode_video((folder / "google_rue_de_londres.mp4").read_bytes(), ALL, POLICY)
    assert torch.equal(whole.frames[37:], item.frames[-21:])
