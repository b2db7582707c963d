"""Clips from files and frames: which frames, when they were, and what a damaged file gives."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium.mm.errors import MediaError
from sensorium.mm.media import video
from sensorium.mm.media.video import load_video

FRAMES = np.random.default_rng(0).integers(0, 256, (10, 8, 12, 3), dtype=np.uint8)
SAMPLING = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "multiple": 2}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """40 frames of 64x48 at 10 a second: red for 2 s, then blue."""
    import cv2

    path = tmp_path_factory.mktemp("clips") / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10.0, (64, 48))
    for i in range(40):
        writer.write(np.full((48, 64, 3), (0, 0, 255) if i < 20 else (255, 0, 0), np.uint8))
    writer.release()
    return path


def colours(frames: torch.Tensor) -> list[str]:
    return ["red" if frame[..., 0].float().mean() > 128 else "blue" for frame in frames]


def test_a_file_is_sampled_with_true_times(clip):
    data = clip.read_bytes()
    forms = [data, clip, str(clip), "data:video/avi;base64," + base64.b64encode(data).decode()]
    items = [load_video(form, 0, SAMPLING) for form in forms]
    assert len({item.hash for item in items}) == 1
    item = items[0]
    assert item.frames.shape == (8, 48, 64, 3)
    assert item.timestamps == pytest.approx([0.5 * i for i in range(8)])
    assert item.fps == pytest.approx(2.0)
    assert colours(item.frames) == ["red"] * 4 + ["blue"] * 4
    assert item.size == (48, 64)


def test_sampling_is_obeyed(clip):
    assert len(load_video(clip, 0, {"num_frames": 6, "multiple": 2}).frames) == 6
    assert len(load_video(clip, 0, {}).frames) == 40
    assert load_video(clip, 0, {"num_frames": 6}).fps == pytest.approx(1.5)
    with pytest.raises(MediaError, match="video 1: 50 frames are wanted but the clip has 40"):
        load_video(clip, 1, {"num_frames": 50})


def test_a_clip_cut_off_gives_what_is_there(clip):
    data = clip.read_bytes()
    item = load_video(data[: len(data) * 3 // 5], 0, {})
    assert 15 < len(item.frames) < 40
    assert item.timestamps == pytest.approx([0.1 * i for i in range(len(item.frames))])


def test_a_header_that_promises_too_much_is_logged(clip, caplog, monkeypatch):
    monkeypatch.setattr(video, "_probe", lambda data: (60, 10.0, (48, 64)))
    with caplog.at_level(logging.WARNING, "sensorium"):
        item = load_video(clip, 0, SAMPLING)
    assert len(item.frames) == 8  # of 12, still half a second apart
    assert item.fps == pytest.approx(2.0)
    assert "8 of the 12 frames" in caplog.text
    monkeypatch.setattr(video, "_read", lambda *args: ([], []))
    with pytest.raises(MediaError, match="no frame can be decoded"):
        load_video(clip, 0, SAMPLING)


def test_too_many_pixels_are_refused_before_decoding(clip):
    with pytest.raises(MediaError, match=r"video 0: 40 frames are 368,640 bytes, the limit is 368,639; lower fps"):
        load_video(clip, 0, {}, max_bytes=368_639)


def test_bare_frames_are_used_as_they_are():
    forms = [FRAMES, torch.from_numpy(FRAMES), FRAMES.transpose(0, 3, 1, 2), list(FRAMES), [Image.fromarray(f) for f in FRAMES]]
    items = [load_video(form, 0, SAMPLING) for form in forms]
    assert len({item.hash for item in items}) == 1
    assert np.array_equal(items[0].frames.numpy(), FRAMES)
    assert items[0].fps == 24
    assert items[0].timestamps[3] == pytest.approx(3 / 24)
    assert len(load_video(FRAMES, 0, {"num_frames": 4, "multiple": 2}).frames) == 4


def test_metadata_of_frames():
    whole = load_video((FRAMES, {"fps": 5.0}), 0, SAMPLING)  # 2 s of source at 2 a second
    assert whole.frames.shape[0] == 4
    assert whole.timestamps == pytest.approx([0.0, 0.4, 1.0, 1.4])
    assert whole.fps == pytest.approx(2.0)
    done = load_video((FRAMES, {"fps": 30.0, "total_num_frames": 100, "frames_indices": range(0, 100, 10)}), 0, SAMPLING)
    assert len(done.frames) == 10
    assert done.fps == pytest.approx(3.0)
    assert done.timestamps[-1] == pytest.approx(3.0)
    with pytest.raises(MediaError, match="frames_indices names 2 frames but 10"):
        load_video((FRAMES, {"fps": 30.0, "frames_indices": [0, 1]}), 0, SAMPLING)


def test_one_frame_and_no_rate():
    assert load_video((FRAMES[:1], {"fps": 30.0}), 0, SAMPLING).timestamps == (0.0,)
    assert load_video((FRAMES, {"fps": 0}), 0, SAMPLING).fps == 24


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"not a clip at all", "not in a video format"),
        ("http://x/y.mp4", "fetching http URLs is off"),
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
    with pytest.raises(MediaError, match=text) as error:
        load_video(value, 3, SAMPLING)
    assert str(error.value).startswith("video 3: ")


@pytest.mark.shared
def test_real_clips(shared_data: Path):
    folder = shared_data / "videos"
    item = load_video(folder / "three_colours.mp4", 0, SAMPLING)
    assert item.frames.shape == (12, 240, 320, 3)
    assert item.frames.float().mean((1, 2)).argmax(1).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert item.timestamps[:4] == pytest.approx([0, 0.48, 1.0, 1.48])
    assert len(load_video(folder / "truncated.mp4", 0, {}).frames) == 84
    assert len(load_video(folder / "corrupt_midfile.mp4", 0, {}).frames) == 22
