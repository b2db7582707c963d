"""The index of packets compared with decoding, for many codecs and containers, and the packets that are decoded."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import torch
from clips import CLIPS, UNTIMED, clip, encode, plainly
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import video_pyav
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, probe_video

POLICY, ALL = MediaPolicy(), FrameSampling()
TWO = FrameSampling(fps=2.0, min_frames=4, max_frames=768, multiple=2)
EIGHT = FrameSampling(num_frames=8, spread="ends")
UNEVEN = [0, 100, 150, 900, 905, 2000, 2040, 2080]  # milliseconds


@pytest.mark.parametrize("name", CLIPS)
def test_the_index_agrees_with_decoding(name):
    data = clip(name)
    expected, times = plainly(data)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert header.exact
    assert item.header == header
    assert header.frames.total == len(expected) == 40
    assert header.frames.timestamps == pytest.approx(times)
    assert header.frames.fps == pytest.approx(10.0)
    assert np.array_equal(item.frames.numpy(), expected)


@pytest.mark.parametrize("name", UNTIMED)
def test_packets_without_times_are_counted(name):
    data = clip(name)
    expected, _ = plainly(data)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert not header.exact  # a count of packets is an upper bound
    assert item.header.frames == header.frames
    assert header.frames.timestamps == pytest.approx([i / 10 for i in range(40)])
    assert np.array_equal(item.frames.numpy(), expected)
    few = decode_video(data, EIGHT, POLICY)
    assert np.array_equal(few.frames.numpy(), expected[list(few.plan.indices)])


@pytest.mark.parametrize("name", CLIPS)
def test_seeking_gives_the_same_frames(name, monkeypatch):
    data = clip(name)
    expected, times = plainly(data)
    decoded, decode = [], video_pyav._decode
    monkeypatch.setattr(video_pyav, "_decode", lambda *args: decoded.append(args) or decode(*args))
    for sampling in (EIGHT, FrameSampling(num_frames=3), FrameSampling(fps=0.5), FrameSampling(num_frames=1)):
        item = decode_video(data, sampling, POLICY)
        assert np.array_equal(item.frames.numpy(), expected[list(item.plan.indices)])
        assert item.plan.timestamps == pytest.approx([times[i] for i in item.plan.indices])
        assert not item.plan.missing
    if name != "h264-refresh-mkv":  # its keyframes are none, so it is read twice
        assert len(decoded) < 3 * 42  # four passes


def test_decode_ranges():
    closed = [(0, True), (2, False), (1, False), (3, True), (4, False), (5, True), (6, False)]
    assert video_pyav.decode_ranges(closed, {0}) == [range(0, 1)]
    assert video_pyav.decode_ranges(closed, {1, 6}) == [range(0, 3), range(5, 7)]
    assert video_pyav.decode_ranges(closed, {4}) == [range(3, 5)]
    assert video_pyav.decode_ranges(closed, {1, 3}) == [range(0, 4)]
    leading = [(0, True), (1, False), (3, True), (2, False), (4, False)]  # 2 is shown before the keyframe it lies behind
    assert video_pyav.decode_ranges(leading, {2}) == [range(0, 4)]
    assert video_pyav.decode_ranges(leading, {3, 4}) == [range(2, 5)]
    assert video_pyav.decode_ranges([(0, False), (-1, True), (1, False)], {1}) == [range(3)]


def test_far_fewer_frames_are_decoded_than_there_are(monkeypatch):
    decoded, decode = [], video_pyav._decode
    monkeypatch.setattr(video_pyav, "_decode", lambda *args: decoded.append(args) or decode(*args))
    decode_video(clip("h264-mp4"), FrameSampling(num_frames=2), POLICY)
    assert len(decoded) <= 14  # one keyframe, and one a few frames before number 20, of 40
    decoded.clear()
    decode_video(clip("mjpeg-avi"), EIGHT, POLICY)
    assert len(decoded) == 16  # each followed by a flush


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_at_uneven_times(container):
    data = encode("libx264", container, count=8, stamps=UNEVEN)
    item = decode_video(data, ALL, POLICY)
    assert item.plan.timestamps == pytest.approx([t / 1000 for t in UNEVEN])
    assert np.array_equal(item.frames.numpy(), plainly(data)[0])
    two = decode_video(data, FrameSampling(fps=2.0), POLICY)  # on screen at 0, 0.59, 1.19 and 1.78 s of 2.38
    assert two.plan.indices == (0, 2, 4)  # number 4 twice: it is taken once
    assert two.plan.timestamps == pytest.approx([0.0, 0.15, 0.905])
    assert probe_video(data, FrameSampling(max_duration=0.9), POLICY).frames.indices == (0, 1, 2)
    opencv = decode_video(data, FrameSampling(fps=2.0), MediaPolicy(video_backend="opencv"))
    assert torch.equal(opencv.frames, two.frames)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_rotated_videos_are_upright(container, rotation):
    data = encode("libx264", container, count=3, size=(48, 64), rotation=rotation)
    header, item = probe_video(data, ALL, POLICY), decode_video(data, ALL, POLICY)
    assert item.header == header
    assert header.size == ((64, 48) if rotation % 180 else (48, 64))
    assert np.array_equal(item.frames[1].numpy(), np.rot90(plainly(data)[0][1], rotation // 90))
    assert torch.equal(decode_video(data, ALL, MediaPolicy(video_backend="opencv")).frames, item.frames)


def test_one_frame():
    for name in ("h264-mp4", "vp9-webm", "mjpeg-avi", "h264-raw"):
        data = encode(*(CLIPS | UNTIMED)[name], count=1)
        for sampling in (ALL, TWO, FrameSampling(num_frames=1), FrameSampling(num_frames=-1)):
            item = decode_video(data, sampling, POLICY)
            assert item.plan.indices == (0,)
            assert item.plan.timestamps == (0.0,)
            assert item.plan.fps > 0
            assert len(item.frames) == 1


def test_a_recording_of_a_live_stream():
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


def test_frames_that_are_never_shown_are_not_counted():
    data = bytearray(clip("vp8-webm"))
    with av.open(io.BytesIO(bytes(data))) as container:
        packet = [bytes(p) for p in container.demux(video=0)][7]
    data[data.index(packet)] &= ~0x10 & 0xFF  # its show_frame
    expected, _ = plainly(bytes(data))
    item = decode_video(bytes(data), ALL, POLICY)
    assert len(expected) == len(item.frames) == probe_video(bytes(data), ALL, POLICY).frames.total == 39
    assert np.array_equal(item.frames.numpy(), expected)


def test_frames_are_counted_where_timestamps_restart():
    data = clip("h264-ts") * 2
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


def test_too_long_a_video_is_refused(monkeypatch):
    monkeypatch.setattr(video_pyav, "_MAX_PACKETS", 39)
    with pytest.raises(InputError, match="more than 39 video packets; cut it"):
        probe_video(clip("h264-mp4"), ALL, POLICY)


def test_files_that_name_other_files_are_not_followed(tmp_path):
    secret = tmp_path / "secret.ts"
    secret.write_bytes(clip("h264-ts"))
    for text in (
        f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
    ):
        with pytest.raises(InputError, match="not in a supported video format"):
            probe_video(text.encode(), ALL, POLICY)
