"""Clips from files and frames: which frames, when they were, which packets were decoded, and what a damaged file gives."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image
from sensorium.mm.errors import InputError
from sensorium.mm.geometry import SamplingPolicy
from sensorium.mm.media import video_opencv, video_pyav
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, hash_video, probe_video

POLICY, ALL = MediaPolicy(), SamplingPolicy()
TWO = SamplingPolicy(fps=2.0, min_frames=4, max_frames=768, multiple=2)
EIGHT = SamplingPolicy(num_frames=8, spread="ends")
FRAMES = np.random.default_rng(0).integers(0, 256, (10, 8, 12, 3), dtype=np.uint8)
UNEVEN = [0, 100, 150, 900, 905, 2000, 2040, 2080]  # milliseconds

CLIPS = {  # name: codec, container, options
    "h264-mp4": ("libx264", "mp4", {"g": "12", "bf": "3"}),
    "h264-open-gop-mkv": ("libx264", "matroska", {"g": "12", "x264-params": "open-gop=1:keyint=12:bframes=4:b-pyramid=normal"}),
    "h264-one-gop-mp4": ("libx264", "mp4", {"g": "250", "bf": "8"}),
    "h264-refresh-mkv": ("libx264", "matroska", {"x264-params": "intra-refresh=1:keyint=15"}),
    "h264-ts": ("libx264", "mpegts", {"g": "12"}),
    "h264-plain-avi": ("libx264", "avi", {"g": "12", "bf": "0"}),
    "hevc-mp4": ("libx265", "mp4", {"x265-params": "log-level=none:keyint=12:open-gop=1:bframes=4"}),
    "vp9-webm": ("libvpx-vp9", "webm", {"g": "12"}),
    "vp8-webm": ("libvpx", "webm", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "av1-mp4": ("libsvtav1", "mp4", {"g": "12"}),
    "mpeg4-mp4": ("mpeg4", "mp4", {"g": "12", "bf": "2"}),
    "mpeg2-ps": ("mpeg2video", "mpeg", {"g": "12", "bf": "2"}),
    "mjpeg-avi": ("mjpeg", "avi", {}),
    "gif": ("gif", "gif", {}),
}
UNTIMED = {  # their packets have no presentation stamps to rely on
    "h264-avi": ("libx264", "avi", {"g": "12", "bf": "3"}),
    "mpeg4-avi": ("mpeg4", "avi", {"g": "12", "bf": "2"}),
    "h264-raw": ("libx264", "h264", {"g": "12"}),
}
PIXELS = {"mjpeg": "yuvj420p", "gif": "rgb8"}


def encode(codec, container, options=None, count=40, size=(64, 64), stamps=None, rotation=0, muxer=None) -> bytes:
    """`count` moving noisy frames at 10 a second, or at `stamps` in milliseconds."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    noise, buffer = np.random.default_rng(1), io.BytesIO()
    with av.open(buffer, "w", format=container, options=muxer or {}) as output:
        stream = output.add_stream(codec, rate=10, options=options or {})
        stream.height, stream.width, stream.pix_fmt = *size, PIXELS.get(codec, "yuv420p")
        if stamps:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        rows, columns = np.mgrid[: size[0], : size[1]]
        for i in range(count):
            picture = np.stack([rows * 3 + i * 5, columns * 2 + i * 7, rows + columns + i * 3], -1) % 200
            picture = picture.astype(np.uint8) + noise.integers(0, 50, picture.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if stamps:
                frame.pts, frame.time_base = stamps[i], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def clips():
    made: dict[str, bytes] = {}

    def clip(name: str) -> bytes:
        if name not in made:
            made[name] = encode(*(CLIPS | UNTIMED)[name])
        return made[name]

    return clip


def plainly(data: bytes) -> tuple[np.ndarray, list[float]]:
    """All frames and their times as PyAV's own loop gives them."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    times = [0.0 if f.pts is None else float((f.pts - frames[0].pts) * f.time_base) for f in frames]
    return np.stack([f.to_ndarray(format="rgb24") for f in frames]), times


@pytest.mark.parametrize("name", CLIPS)
def test_the_packet_index_says_what_decoding_gives(clips, name):
    data = clips(name)
    expected, times = plainly(data)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert header.exact
    assert item.header == header
    assert header.frames.total == len(expected) == 40
    assert header.frames.timestamps == pytest.approx(times)
    assert header.frames.fps == pytest.approx(10.0)
    assert np.array_equal(item.frames.numpy(), expected)


@pytest.mark.parametrize("name", UNTIMED)
def test_packets_without_times_are_counted(clips, name):
    data = clips(name)
    expected, _ = plainly(data)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert not header.exact  # a count of packets is an upper bound
    assert item.header.frames == header.frames
    assert header.frames.timestamps == pytest.approx([i / 10 for i in range(40)])
    assert np.array_equal(item.frames.numpy(), expected)
    few = decode_video(data, EIGHT, POLICY)
    assert np.array_equal(few.frames.numpy(), expected[list(few.plan.indices)])


@pytest.mark.parametrize("name", CLIPS)
def test_jumping_gives_the_same_frames(clips, name, monkeypatch):
    data = clips(name)
    expected, times = plainly(data)
    decoded, decode = [], video_pyav._decode
    monkeypatch.setattr(video_pyav, "_decode", lambda *args: decoded.append(args) or decode(*args))
    for sampling in (EIGHT, SamplingPolicy(num_frames=3), SamplingPolicy(fps=0.5), SamplingPolicy(num_frames=1)):
        item = decode_video(data, sampling, POLICY)
        assert np.array_equal(item.frames.numpy(), expected[list(item.plan.indices)])
        assert item.plan.timestamps == pytest.approx([times[i] for i in item.plan.indices])
        assert not item.plan.missing
    if name != "h264-refresh-mkv":  # its keyframes are none, so it is read twice
        assert len(decoded) < 3 * 42  # four passes


def test_what_has_to_be_decoded():
    closed = [(0, True), (2, False), (1, False), (3, True), (4, False), (5, True), (6, False)]
    assert video_pyav.stretches(closed, {0}) == [range(0, 1)]
    assert video_pyav.stretches(closed, {1, 6}) == [range(0, 3), range(5, 7)]
    assert video_pyav.stretches(closed, {4}) == [range(3, 5)]
    assert video_pyav.stretches(closed, {1, 3}) == [range(0, 4)]
    leading = [(0, True), (1, False), (3, True), (2, False), (4, False)]  # 2 is shown before the keyframe it lies behind
    assert video_pyav.stretches(leading, {2}) == [range(0, 4)]
    assert video_pyav.stretches(leading, {3, 4}) == [range(2, 5)]
    assert video_pyav.stretches([(0, False), (-1, True), (1, False)], {1}) == [range(3)]


def test_far_fewer_frames_are_decoded_than_there_are(clips, monkeypatch):
    decoded, decode = [], video_pyav._decode
    monkeypatch.setattr(video_pyav, "_decode", lambda *args: decoded.append(args) or decode(*args))
    decode_video(clips("h264-mp4"), SamplingPolicy(num_frames=2), POLICY)
    assert len(decoded) <= 14  # one keyframe, and one a few frames before number 20, of 40
    decoded.clear()
    decode_video(clips("mjpeg-avi"), EIGHT, POLICY)
    assert len(decoded) == 16  # each followed by a flush


@pytest.mark.parametrize("name", [n for n in (CLIPS | UNTIMED) if n != "av1-mp4"])  # OpenCV's wheel has no AV1 decoder
def test_opencv_reads_the_same_frames(clips, name):
    pytest.importorskip("cv2")
    for sampling in (ALL, EIGHT):
        ours, theirs = (decode_video(clips(name), sampling, MediaPolicy(video_backend=b)) for b in ("pyav", "opencv"))
        assert ours.plan == theirs.plan
        assert (ours.frames.int() - theirs.frames.int()).abs().max() <= 1


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_at_uneven_times(container):
    data = encode("libx264", container, count=8, stamps=UNEVEN)
    item = decode_video(data, ALL, POLICY)
    assert item.plan.timestamps == pytest.approx([t / 1000 for t in UNEVEN])
    assert np.array_equal(item.frames.numpy(), plainly(data)[0])
    two = decode_video(data, SamplingPolicy(fps=2.0), POLICY)  # on screen at 0, 0.59, 1.19 and 1.78 s of 2.38
    assert two.plan.indices == (0, 2, 4)  # number 4 twice: it is taken once
    assert two.plan.timestamps == pytest.approx([0.0, 0.15, 0.905])
    assert probe_video(data, SamplingPolicy(max_duration=0.9), POLICY).frames.indices == (0, 1, 2)
    opencv = decode_video(data, SamplingPolicy(fps=2.0), MediaPolicy(video_backend="opencv"))
    assert torch.equal(opencv.frames, two.frames)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_turned_clips_stand_upright(container, rotation):
    data = encode("libx264", container, count=3, size=(48, 64), rotation=rotation)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert item.header == header
    assert header.size == ((64, 48) if rotation % 180 else (48, 64))
    assert np.array_equal(item.frames[1].numpy(), np.rot90(plainly(data)[0][1], rotation // 90))
    assert torch.equal(decode_video(data, ALL, MediaPolicy(video_backend="opencv")).frames, item.frames)


def test_one_frame(clips):
    for name in ("h264-mp4", "vp9-webm", "mjpeg-avi", "h264-raw"):
        data = encode(*(CLIPS | UNTIMED)[name], count=1)
        for sampling in (ALL, TWO, SamplingPolicy(num_frames=1), SamplingPolicy(num_frames=-1)):
            item = decode_video(data, sampling, POLICY)
            assert item.plan.indices == (0,)
            assert item.plan.timestamps == (0.0,)
            assert item.plan.fps > 0
            assert len(item.frames) == 1


def test_a_stream_that_was_live():
    data = encode("libvpx-vp9", "webm", {"g": "12"}, muxer={"live": "1"})  # no duration, no seek table
    expected, _ = plainly(data)
    item = decode_video(data, EIGHT, POLICY)
    assert np.array_equal(item.frames.numpy(), expected[list(item.plan.indices)])
    assert probe_video(data, ALL, POLICY).exact


def test_a_stream_that_begins_between_keyframes():
    data = encode("libx264", "mpegts", {"g": "12"})
    cut = data[188 * 20 :]
    header, item = probe_video(cut, ALL, POLICY), decode_video(cut, ALL, POLICY)
    assert item.header.frames == header.frames
    whole = decode_video(data, ALL, POLICY)
    assert 20 < len(item.frames) < 40
    assert torch.equal(item.frames, whole.frames[-len(item.frames) :])
    assert item.plan.timestamps[0] == 0.0  # from the first frame shown


def test_pictures_that_are_never_shown_are_not_counted(clips):
    data = bytearray(clips("vp8-webm"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packet = [bytes(p) for p in container.demux(video=0)][7]
    data[data.index(packet)] &= ~0x10 & 0xFF  # its show_frame
    expected, _ = plainly(bytes(data))
    item = decode_video(bytes(data), ALL, POLICY)
    assert len(expected) == len(item.frames) == probe_video(bytes(data), ALL, POLICY).frames.total == 39
    assert np.array_equal(item.frames.numpy(), expected)


def test_a_stream_whose_clock_starts_anew_is_counted(clips):
    data = clips("h264-ts") * 2
    expected, _ = plainly(data)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert not header.exact
    assert len(expected) == len(item.frames) == header.frames.total == 80
    assert header.frames.timestamps == pytest.approx([i / 10 for i in range(80)])
    assert np.array_equal(item.frames.numpy(), expected)


def test_frames_that_an_edit_list_cuts_are_not_counted():
    data = bytearray(encode("libx264", "mp4", {"g": "12", "bf": "0"}))
    at = data.index(b"elst") + 16  # media time of the first edit, in 1/10240 s
    start = int.from_bytes(data[at : at + 4], "big")
    data[at : at + 4] = (start + 5 * 1024).to_bytes(4, "big")
    expected, _ = plainly(bytes(data))
    item = decode_video(bytes(data), ALL, POLICY)
    assert item.header.frames == probe_video(bytes(data), ALL, POLICY).frames
    assert item.plan.total == len(expected) == 35
    assert np.array_equal(item.frames.numpy(), expected)


def test_sampling_is_obeyed(clips):
    data = clips("mjpeg-avi")
    item = decode_video(data, TWO, POLICY)
    assert item.frames.shape == (8, 64, 64, 3)
    assert item.plan.timestamps == pytest.approx([0.5 * i for i in range(8)])
    assert item.plan.fps == pytest.approx(2.0)
    assert len(decode_video(data, SamplingPolicy(num_frames=6, multiple=2), POLICY).frames) == 6
    assert decode_video(data, SamplingPolicy(num_frames=6), POLICY).plan.fps == pytest.approx(1.5)
    assert probe_video(data, SamplingPolicy(fps=0.1), POLICY).frames.indices == (0,)  # a step longer than the clip
    half = probe_video(data, SamplingPolicy(num_frames=4, max_duration=2.0), POLICY).frames
    assert half.indices == (0, 5, 10, 15)
    assert half.total == 40
    assert half.fps == pytest.approx(2.0)
    with pytest.raises(InputError, match="50 frames are wanted but the clip has 40; lower"):
        probe_video(data, SamplingPolicy(num_frames=50), POLICY)
    with pytest.raises(InputError, match=r"25 frames are wanted but the clip has 20 in its first 2 s; lower"):
        probe_video(data, SamplingPolicy(num_frames=25, max_duration=2.0), POLICY)


def damaged(frame: int) -> bytes:
    """26 pictures, each decodable alone, of which one is not."""
    data = encode("mjpeg", "avi", count=26)
    with av.open(io.BytesIO(data)) as container:
        packet = [bytes(p) for p in container.demux(video=0)][frame]
    return data.replace(packet, bytes(len(packet)))


@pytest.mark.parametrize("backend", ["pyav", "opencv"])
def test_a_broken_frame_is_missing_or_has_a_stand_in(backend, caplog):
    data, whole = damaged(17), decode_video(encode("mjpeg", "avi", count=26), ALL, POLICY)
    with caplog.at_level(logging.WARNING, "sensorium"):
        item = decode_video(data, EIGHT, MediaPolicy(video_backend=backend))
    assert "7 of the 8 frames wanted" in caplog.text
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


def test_a_stand_in_never_comes_from_beyond_the_next_target():
    item = decode_video(damaged(17), ALL, MediaPolicy(frame_recovery=True))
    assert item.plan.missing == (17,)
    assert item.plan.replaced == ()
    last = decode_video(damaged(25), EIGHT, MediaPolicy(frame_recovery=True))
    assert last.plan.missing == (25,)


def test_a_damaged_middle_does_not_shift_numbers(clips):
    data = bytearray(clips("h264-mp4"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0)]
    for at, size in packets[13:18]:
        data[at : at + size] = bytes(size)
    whole, item = decode_video(clips("h264-mp4"), ALL, POLICY), decode_video(bytes(data), ALL, POLICY)
    assert 0 < len(item.plan.missing) < 12
    assert item.plan.indices[-10:] == tuple(range(30, 40))
    assert torch.equal(item.frames[-10:], whole.frames[-10:])
    assert torch.equal(item.frames[:10], whole.frames[:10])


def test_a_clip_cut_off_gives_what_is_there(clips):
    data = clips("mjpeg-avi")
    cut = data[: len(data) * 3 // 5]
    header, item = probe_video(cut, ALL, POLICY), decode_video(cut, ALL, POLICY)
    assert 15 < header.frames.total < 40
    assert len(item.frames) in (header.frames.total, header.frames.total - 1)
    assert item.plan.timestamps == pytest.approx([0.1 * i for i in range(len(item.frames))])
    with pytest.raises(InputError, match=r"not in a video format|no frames"):
        decode_video(clips("h264-mp4")[:2000], ALL, POLICY)  # the table of packets is at the end


def test_nothing_readable_is_an_error():
    data = encode("mjpeg", "avi", count=3)
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(video=0):
            data = data.replace(bytes(packet), bytes(packet.size)) if packet.size else data
    with pytest.raises(InputError, match=r"no frame can be decoded|no size"):
        decode_video(data, ALL, POLICY)


def test_frames_of_another_size_are_left_out(caplog):
    small, large = (encode("libx264", "h264", {"bf": "0"}, count=5, size=size) for size in ((64, 64), (96, 64)))
    with caplog.at_level(logging.WARNING, "sensorium"):
        item = decode_video(small + large, ALL, POLICY)
    assert item.frames.shape == (5, 96, 64, 3)  # the header tells the size of the second half
    assert item.plan.missing == (0, 1, 2, 3, 4)
    assert "5 of the 10" in caplog.text
    with pytest.raises(InputError, match="its header says 64x96 but its frames are 64x64"):
        decode_video(small + large, SamplingPolicy(num_frames=1), POLICY)


def test_limits_hold_before_anything_is_decoded(clips, monkeypatch):
    monkeypatch.setattr(video_pyav, "_decode", None)
    data = clips("h264-mp4")
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=r"40 frames are 491,520 bytes, the limit is 491,519; lower num_frames or fps"):
            call(data, ALL, MediaPolicy(max_video_bytes=491_519))
        with pytest.raises(InputError, match=r"frames of 64x64 are over the limit of 4,095 pixels"):
            call(data, ALL, MediaPolicy(max_pixels=4095))
        with pytest.raises(InputError, match=r"10 frames are 2,880 bytes, the limit is 2,879"):
            call(FRAMES, ALL, MediaPolicy(max_video_bytes=2879))
        with pytest.raises(InputError, match=r"frames of 12x8 are over the limit of 95 pixels"):
            call(FRAMES, ALL, MediaPolicy(max_pixels=95))


def test_too_long_a_clip_is_refused(clips, monkeypatch):
    monkeypatch.setattr(video_pyav, "_MOST_PACKETS", 39)
    with pytest.raises(InputError, match="more than 39 packets of pictures; cut it"):
        probe_video(clips("h264-mp4"), ALL, POLICY)


def test_a_seek_to_nowhere_does_not_crash_opencv():
    stream = video_opencv._Stream(b"abc")
    assert [stream.seek(-184_524_588), stream.seek(1), stream.seek(2**63 - 1, 1), stream.seek(1 << 80)] == [3, 1, 3, 3]


def test_files_that_name_other_files_are_not_followed(tmp_path, clips):
    secret = tmp_path / "secret.ts"
    secret.write_bytes(clips("h264-ts"))
    for text in (
        f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
    ):
        with pytest.raises(InputError, match="not in a video format"):
            probe_video(text.encode(), ALL, POLICY)


def test_bare_frames_are_used_as_they_are():
    forms = [FRAMES, torch.from_numpy(FRAMES), FRAMES.transpose(0, 3, 1, 2), list(FRAMES), [Image.fromarray(f) for f in FRAMES]]
    assert len({hash_video(form) for form in forms}) == 1
    for form in forms:
        item = decode_video(form, TWO, POLICY)
        assert item.header == probe_video(form, TWO, POLICY)
        assert np.array_equal(item.frames.numpy(), FRAMES)
        assert item.plan.fps == 24
        assert item.plan.timestamps[3] == pytest.approx(3 / 24)
    assert decode_video(FRAMES, SamplingPolicy(num_frames=4, multiple=2), POLICY).plan.indices == (0, 2, 5, 7)
    assert len(decode_video(FRAMES, SamplingPolicy(num_frames=-1), POLICY).frames) == 10
    assert len(decode_video(FRAMES, SamplingPolicy(fps=2.0, max_duration=0.1), POLICY).frames) == 10
    grey = decode_video(FRAMES[..., :1], ALL, POLICY)
    assert torch.equal(grey.frames[..., 2], torch.from_numpy(FRAMES[..., 0]))


def test_metadata_of_frames():
    whole = decode_video((FRAMES, {"fps": 5.0}), TWO, POLICY)  # 2 s of source at 2 a second
    assert whole.plan.indices == (0, 2, 5, 7)
    assert whole.plan.timestamps == pytest.approx([0.0, 0.4, 1.0, 1.4])
    assert whole.plan.fps == pytest.approx(2.0)
    assert np.array_equal(whole.frames.numpy(), FRAMES[[0, 2, 5, 7]])
    assert decode_video((FRAMES, {"duration": 2.0}), TWO, POLICY).plan == whole.plan
    given = {"fps": 30.0, "total_num_frames": 100, "frames_indices": list(range(0, 100, 10))}
    for metadata in (given, SimpleNamespace(**given), {**given, "do_sample_frames": False}):
        done = decode_video((FRAMES, metadata), TWO, POLICY)
        assert done.header == probe_video((FRAMES, metadata), TWO, POLICY)
        assert done.plan.indices == tuple(range(0, 100, 10))
        assert done.plan.total == 100
        assert done.plan.fps == pytest.approx(3.0)
        assert done.plan.timestamps[-1] == pytest.approx(3.0)
    again = decode_video((FRAMES, {**given, "do_sample_frames": True}), SamplingPolicy(num_frames=2), POLICY)
    assert again.plan.indices == (0, 50)
    assert np.array_equal(again.frames.numpy(), FRAMES[[0, 5]])
    chosen = decode_video((FRAMES, {"fps": 5.0, "do_sample_frames": False}), TWO, POLICY)
    assert len(chosen.frames) == 10
    assert decode_video((FRAMES, {"fps": 0}), TWO, POLICY).plan.fps == 24
    assert decode_video((FRAMES, None), TWO, POLICY).plan.fps == 24
    assert decode_video((FRAMES[:1], {"fps": 30.0}), TWO, POLICY).plan.timestamps == (0.0,)


def test_metadata_of_transformers():
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(
        total_num_frames=20, fps=10.0, width=12, height=8, duration=2.0, frames_indices=list(range(0, 20, 2))
    )
    item = decode_video((FRAMES, metadata), TWO, POLICY)
    assert item.plan.timestamps == pytest.approx(metadata.timestamps)
    assert item.plan.fps == pytest.approx(metadata.sampled_fps)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"fps": 30.0, "frames_indices": [0, 1]}, "frames_indices names 2 frames but 10"),
        ({"total_frames": 10}, "no 'total_frames'; did you mean total_num_frames"),
        ({"zzz": 10}, "no 'zzz'; the known ones are total_num_frames, fps"),
        ({"total_num_frames": 9, "frames_indices": range(10)}, "frame 9 is not one of total_num_frames=9"),
        ({"total_num_frames": 30}, "30 but 10 frames were given; give frames_indices"),
        ({"frames_indices": list(range(10, 0, -1))}, "not in order of time"),
        ({"frames_indices": [0.5] * 10}, "whole numbers"),
        ({"frames_indices": "0123456789"}, "whole numbers"),
        ({"fps": "ten"}, "fps of the metadata is 'ten'"),
        ({"fps": float("nan")}, "fps of the metadata is 'nan'"),
        ({"fps": 1e300}, "give a number from 0 to 1e"),
        ({"duration": -1.0}, "duration of the metadata is '-1"),
        (7, "not a int"),
    ],
)
def test_metadata_that_is_refused(metadata, text):
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=text):
            call((FRAMES, metadata), TWO, POLICY)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"not a clip at all", "not in a video format"),
        (b"", "not in a video format"),
        (np.zeros((8, 8, 3), np.uint8), "4 axes"),
        (np.zeros((2, 8, 8, 3)), "uint8"),
        (np.zeros((2, 8, 8, 4), np.uint8), "RGB, not of 4 channels"),
        ([], "a list is not a known form"),
        ([FRAMES[0], "x"], "pictures"),
        ([FRAMES[0], FRAMES[1][:4]], "one size"),
        (7, "a int is not a known form"),
    ],
)
def test_what_is_refused_is_named(value, text):
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=text) as error:
            call(value, TWO, POLICY)
        assert "\n" not in str(error.value)


def test_sound_and_pictures_are_no_clips():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 16000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    with pytest.raises(InputError, match="no moving pictures"):
        probe_video(buffer.getvalue(), ALL, POLICY)
    picture = io.BytesIO()
    Image.fromarray(FRAMES[0]).save(picture, "PNG")
    with pytest.raises(InputError, match="not in a video format"):
        probe_video(picture.getvalue(), ALL, POLICY)


def test_the_hash_is_of_the_source(clips):
    data = clips("h264-mp4")
    assert hash_video(data) == hash_video(bytearray(data)) != hash_video(data[:-1])
    hashes = [
        hash_video(value)
        for value in (
            FRAMES,
            FRAMES[:5],
            FRAMES.reshape(10, 12, 8, 3),
            FRAMES[::-1],
            (FRAMES, {"fps": 24.0}),
            (FRAMES, {"fps": 30.0}),
            (FRAMES, {"fps": 30.0, "do_sample_frames": False}),
            (FRAMES, {"fps": 30.0, "frames_indices": range(0, 20, 2)}),
            (FRAMES, {"fps": 30.0, "frames_indices": range(0, 20, 2), "total_num_frames": 30}),
        )
    ]
    assert len(set(hashes)) == len(hashes)
    assert hash_video((FRAMES, {"fps": 30.0, "width": 12})) == hash_video((FRAMES, {"fps": 30}))
    with pytest.raises(InputError):
        hash_video(7)


@pytest.mark.parametrize("name", ["h264-mp4", "h264-open-gop-mkv", "vp9-webm", "mjpeg-avi", "h264-ts", "gif"])
def test_mutated_files_give_typed_errors_only(clips, name):
    rng, data = random.Random(name), clips(name)
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
def test_real_clips(shared_data: Path):
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
