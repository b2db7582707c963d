"""The OpenCV backend gives the same frames as PyAV, and survives files with invalid seek positions."""

from __future__ import annotations

import os

import pytest
from clips import CLIPS, UNTIMED, clip
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import video_opencv
from sensorium.mm.media.policy import DecodeClock, MediaPolicy
from sensorium.mm.media.video import decode_video
from sensorium.mm.media.video_pyav import index_video

POLICY, ALL = MediaPolicy(), FrameSampling()
EIGHT = FrameSampling(num_frames=8, spread="ends")


@pytest.mark.parametrize("name", [n for n in (CLIPS | UNTIMED) if n != "av1-mp4"])  # OpenCV's wheel has no AV1 decoder
def test_opencv_reads_the_same_frames(name):
    pytest.importorskip("cv2")
    for sampling in (ALL, EIGHT):
        ours, theirs = (decode_video(clip(name), sampling, MediaPolicy(video_backend=b)) for b in ("pyav", "opencv"))
        assert ours.plan == theirs.plan
        assert (ours.frames.int() - theirs.frames.int()).abs().max() <= 1


@pytest.mark.parametrize("own", [None, "rtsp_transport;udp"])
def test_opencv_opens_what_pyav_may_open(monkeypatch, own):
    cv2 = pytest.importorskip("cv2")
    name, policy, given = "OPENCV_FFMPEG_CAPTURE_OPTIONS", MediaPolicy(video_backend="opencv"), []
    monkeypatch.delenv(name, raising=False) if own is None else monkeypatch.setenv(name, own)
    capture = cv2.VideoCapture
    monkeypatch.setattr(cv2, "VideoCapture", lambda *args: given.append(os.environ[name]) or capture(*args))
    assert len(decode_video(clip("mpeg4-mp4"), EIGHT, policy).frames) == 8
    options = dict(option.split(";") for option in given[0].split("|"))
    assert (options["protocol_whitelist"], options["format_whitelist"]) == ("none", video_opencv.FORMATS)
    assert os.environ.get(name) == own
    monkeypatch.setattr(video_opencv, "FORMATS", "matroska,webm")
    index = index_video(clip("mpeg4-mp4"), policy)
    assert list(video_opencv.read_frames(clip("mpeg4-mp4"), index, range(8), DecodeClock(policy))) == []
    assert os.environ.get(name) == own


def test_an_invalid_seek_does_not_crash_opencv():
    stream = video_opencv._Stream(b"abc")
    assert [stream.seek(-184_524_588), stream.seek(1), stream.seek(2**63 - 1, 1), stream.seek(1 << 80)] == [3, 1, 3, 3]
