"""Videos given as frames: accepted forms and metadata."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, hash_video, probe_video

POLICY, ALL = MediaPolicy(), FrameSampling()
TWO = FrameSampling(fps=2.0, min_frames=4, max_frames=768, multiple=2)
FRAMES = np.random.default_rng(0).integers(0, 256, (10, 8, 12, 3), dtype=np.uint8)


def test_bare_frames_are_used_as_they_are():
    forms = [FRAMES, torch.from_numpy(FRAMES), FRAMES.transpose(0, 3, 1, 2), list(FRAMES), [Image.fromarray(f) for f in FRAMES]]
    assert len({hash_video(form, POLICY) for form in forms}) == 1
    for form in forms:
        item = decode_video(form, TWO, POLICY)
        assert item.header == probe_video(form, TWO, POLICY)
        assert np.array_equal(item.frames.numpy(), FRAMES)
        assert item.plan.fps == 24
        assert item.plan.timestamps[3] == pytest.approx(3 / 24)
    assert decode_video(FRAMES, FrameSampling(num_frames=4, multiple=2), POLICY).plan.indices == (0, 2, 5, 7)
    assert len(decode_video(FRAMES, FrameSampling(num_frames=-1), POLICY).frames) == 10
    assert len(decode_video(FRAMES, FrameSampling(fps=2.0, max_duration=0.1), POLICY).frames) == 10
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
    again = decode_video((FRAMES, {**given, "do_sample_frames": True}), FrameSampling(num_frames=2), POLICY)
    assert again.plan.indices == (0, 50)
    assert np.array_equal(again.frames.numpy(), FRAMES[[0, 5]])
    chosen = decode_video((FRAMES, {"fps": 5.0, "do_sample_frames": False}), TWO, POLICY)
    assert len(chosen.frames) == 10
    assert decode_video((FRAMES, {"fps": 5.0}), FrameSampling(start=0.4, end=1.0), POLICY).plan.indices == (2, 3, 4, 5)
    cut = decode_video((FRAMES, given), FrameSampling(start=0.9, end=2.0), POLICY)  # at 0, 1/3, 2/3 ... 3 s
    assert cut.plan.indices == (30, 40, 50, 60)
    assert cut.plan.timestamps == pytest.approx((1.0, 4 / 3, 5 / 3, 2.0))
    assert np.array_equal(cut.frames.numpy(), FRAMES[3:7])
    with pytest.raises(InputError, match=r"none of its 10 frames lies from 0.1 to 0.3 s; change video_start or video_end"):
        decode_video((FRAMES, given), FrameSampling(start=0.1, end=0.27), POLICY)
    for sampling in (FrameSampling(start=1.0), FrameSampling(end=1.0, num_frames=2)):
        with pytest.raises(InputError, match="video_start or video_end is set but the video's own frame rate is unknown"):
            decode_video(FRAMES, sampling, POLICY)
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
        ({"total_frames": 10}, "unknown key 'total_frames' in metadata of frames; did you mean total_num_frames"),
        ({"zzz": 10}, "unknown key 'zzz' in metadata of frames; the known ones are total_num_frames, fps"),
        ({"total_num_frames": 9, "frames_indices": range(10)}, "frames_indices holds 9, but total_num_frames is 9"),
        ({"total_num_frames": 30}, "30 but 10 frames were given; give frames_indices"),
        ({"frames_indices": list(range(10, 0, -1))}, "must be in order of time"),
        ({"frames_indices": [*range(9), 10**400], "fps": 5.0}, r"must be at most 1e\+09"),
        ({"frames_indices": [0.5] * 10}, "whole numbers"),
        ({"frames_indices": "0123456789"}, "whole numbers"),
        ({"fps": "ten"}, "fps of the metadata is 'ten'"),
        ({"fps": float("nan")}, "fps of the metadata is 'nan'"),
        ({"fps": 1e300}, "give a number from 0 to 1e"),
        ({"duration": -1.0}, "duration of the metadata is '-1"),
        (7, "not an int"),
    ],
)
def test_metadata_that_is_refused(metadata, text):
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=text):
            call((FRAMES, metadata), TWO, POLICY)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((8, 8, 3), np.uint8), "4 axes"),
        (np.zeros((2, 8, 8, 3)), "uint8"),
        (np.zeros((2, 8, 8, 4), np.uint8), "frames have 4 channels; convert them to RGB"),
        ([], "a value of type list is not a known form"),
        ([FRAMES[0], "x"], "images"),
        ([FRAMES[0], FRAMES[1][:4]], "one size"),
        (7, "a value of type int is not a known form"),
    ],
)
def test_invalid_frames_are_refused_with_the_reason(value, text):
    for call in (probe_video, decode_video):
        with pytest.raises(InputError, match=text) as error:
            call(value, TWO, POLICY)
        assert "\n" not in str(error.value)


def test_the_hash_depends_on_frames_and_metadata():
    hashes = [
        hash_video(value, POLICY)
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
    assert hash_video((FRAMES, {"fps": 30.0, "width": 12}), POLICY) == hash_video((FRAMES, {"fps": 30}), POLICY)
    with pytest.raises(InputError):
        hash_video(7, POLICY)
