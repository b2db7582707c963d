"""Sizes, grids and sampled frames: published numbers, transformers' functions at random sizes, and invariants."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from oracle import build_processor, ensure_torchvision
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling, ResizePolicy, patch_grid, sample_indices, smart_resize, usable_range

ensure_torchvision()
QWEN2 = ResizePolicy(28, 56 * 56, 1_003_520)
QWEN3 = ResizePolicy(32, 65_536, 16_777_216)


@pytest.mark.parametrize(
    ("policy", "size", "tokens"),
    [
        (QWEN2, (28, 28), 4),
        (QWEN2, (224, 224), 64),
        (QWEN2, (480, 640), 391),
        (QWEN2, (1080, 1920), 1222),
        (QWEN3, (28, 28), 64),
        (QWEN3, (480, 640), 300),
        (QWEN3, (1080, 1920), 2040),
    ],
)
def test_published_token_counts(policy, size, tokens):
    assert patch_grid(size, policy, merge=2).num_embeds == tokens


def test_rounding_is_half_to_even():
    loose = ResizePolicy(28, 1, 1 << 40)
    assert smart_resize(42, 70, loose) == (56, 56)
    assert smart_resize(98, 14, ResizePolicy(28, 784, 1 << 40)) == (84, 28)  # a side that rounds to 0 makes both grow


@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([QWEN2, QWEN3, ResizePolicy(16, 1024, 65_536)]))
def test_resize_equals_transformers_and_meets_its_constraints(height, width, policy):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as published

    if max(height, width) / min(height, width) > 200:
        with pytest.raises(InputError, match="200:1"):
            smart_resize(height, width, policy)
        return
    tall, wide = smart_resize(height, width, policy)
    assert (tall, wide) == published(height, width, policy.factor, policy.min_pixels, policy.max_pixels)
    assert tall % policy.factor == wide % policy.factor == 0
    assert min(tall, wide) >= policy.factor
    assert tall * wide >= policy.min_pixels
    assert tall * wide <= policy.max_pixels or min(tall, wide) == policy.factor


def test_empty_image():
    with pytest.raises(InputError, match="no pixels"):
        smart_resize(0, 5, QWEN2)


def test_frames_are_grouped_and_the_last_group_is_padded():
    grid = patch_grid((56, 84), QWEN2, merge=2, frames=5, per_step=2, time_step=2.0)
    assert (grid.t, grid.h, grid.w, grid.merge, grid.time_step) == (3, 4, 6, 2, 2.0)
    assert grid.merged == (3, 2, 3)
    assert grid.t * grid.h * grid.w == 72


@pytest.fixture(scope="module")
def published():
    return build_processor().video_processor


@given(data=st.data(), total=st.integers(1, 400), source=st.sampled_from([1.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]))
def test_sampler_equals_transformers(published, data, total, source):
    from transformers.video_utils import VideoMetadata

    wanted = data.draw(st.one_of(st.none(), st.integers(1, 40)), "num_frames")
    fps = None if wanted else data.draw(st.sampled_from([0.5, 1.0, 2.0, 3.3, 30.0]), "fps")
    most = data.draw(st.sampled_from([6, 17, 768]), "max_frames")
    policy = FrameSampling(fps=fps, num_frames=wanted, min_frames=4, max_frames=most, multiple=2)
    metadata = VideoMetadata(total_num_frames=total, fps=source)
    try:
        expected = published.sample_frames(metadata, num_frames=wanted, fps=fps, max_frames=most)
    except ZeroDivisionError:  # videos shorter than a patch of frames are used whole here
        assert len(sample_indices(total, source, policy)) == min(2, total)
        return
    except ValueError:  # more frames than there are: vLLM's loaders lower the number first
        assert sample_indices(total, source, policy) == list(range(total))
        return
    got = sample_indices(total, source, policy)
    assert got == expected.clamp(max=total - 1).tolist()[: len(got)]
    assert len(got) % 2 == 0
    assert len(got) >= len(expected) - 1


def test_uniform_with_both_ends():
    ends = FrameSampling(num_frames=8, spread="ends")
    assert sample_indices(26, None, ends) == [0, 3, 7, 10, 14, 17, 21, 25]
    assert sample_indices(26, None, FrameSampling(num_frames=-1, spread="ends")) == list(range(26))
    assert sample_indices(26, None, FrameSampling(num_frames=8)) == [0, 3, 6, 9, 13, 16, 19, 22]
    assert sample_indices(5, 0.0, FrameSampling(num_frames=-1, multiple=2)) == list(range(5))
    assert sample_indices(5, None, FrameSampling()) == list(range(5))
    assert sample_indices(5, None, FrameSampling(num_frames=8, multiple=2)) == list(range(5))


@pytest.mark.parametrize(
    ("total", "source", "policy", "text"),
    [
        (26, 1.0, FrameSampling(num_frames=0), "num_frames is 0"),
        (26, 1.0, FrameSampling(num_frames=-2), "num_frames is -2"),
        (26, 1.0, FrameSampling(fps=1.0, num_frames=2), "exclude each other"),
        (26, None, FrameSampling(fps=1.0), "rate is unknown"),
        (26, 0.0, FrameSampling(fps=1.0), "rate is unknown"),
        (26, 1.0, FrameSampling(fps=0.0), "fps is 0"),
        (0, 1.0, FrameSampling(), "no frames"),
        (30, 10.0, FrameSampling(max_duration=0.0), "max_duration is 0"),
        (30, None, FrameSampling(max_duration=1.0), "rate is unknown"),
    ],
)
def test_sampler_refuses(total, source, policy, text):
    with pytest.raises(InputError, match=text):
        sample_indices(total, source, policy)


@given(st.integers(1, 300), st.floats(0.1, 120), st.floats(0.1, 60), st.integers(1, 4), st.sampled_from(["stride", "ends"]))
def test_indices_are_ascending_and_in_range(total, source, fps, multiple, spread):
    assume(total >= multiple)
    got = sample_indices(total, source, FrameSampling(fps=fps, multiple=multiple, min_frames=4, max_frames=64, spread=spread))
    assert got == sorted(set(got))
    assert 0 <= got[0] <= got[-1] < total
    assert len(got) % multiple == 0


@given(st.integers(1, 300), st.sampled_from([10.0, 23.976, 25.0, 30.0]), st.floats(0.01, 40), st.sampled_from([0.5, 2.0, None]))
def test_max_duration_samples_the_beginning_only(total, source, seconds, fps):
    policy = FrameSampling(fps=fps, min_frames=2, multiple=2)
    inside = sum(i / source < seconds - 1e-9 for i in range(total))
    got = sample_indices(total, source, replace(policy, max_duration=seconds))
    assert got == sample_indices(inside, source, policy)
    times = [i / source for i in range(total)]
    assert usable_range(total, source, FrameSampling(max_duration=seconds)) == (range(inside), inside / source)
    if not any(abs(time - seconds) < 1e-9 for time in times):
        assert sample_indices(total, source, replace(policy, max_duration=seconds), times) == got


@given(
    st.integers(2, 300), st.sampled_from([8.0, 25.0, 30.0]), st.floats(0, 12), st.floats(0, 12), st.sampled_from([2.0, None])
)
@example(253, 25.0, 1.09375, 10.5, 2.0)  # 225 frames are 9 s, and 18 frames at 2 fps
def test_start_and_end_cut_as_qwen_vl_utils_does(total, source, start, end, fps):
    first, last = math.ceil(min(start, total / source) * source), min(math.floor(end * source), total - 1)
    assume(first <= last and all(abs(x * source - round(x * source)) > 1e-5 for x in (start, end)))
    policy = FrameSampling(fps=fps, min_frames=2, multiple=2)
    inside, cut = last - first + 1, replace(policy, start=start, end=end)
    assert usable_range(total, source, cut) == (range(first, last + 1), pytest.approx(inside / source))
    wanted = [first + i for i in sample_indices(inside, source, policy)]
    assert sample_indices(total, source, cut) == wanted
    assert sample_indices(total, source, cut, [i / source for i in range(total)]) == wanted


def test_start_and_end_at_a_variable_rate_go_by_the_frames_times():
    times = [0.0, 0.1, 0.2, 3.0, 3.1, 3.2, 3.3, 8.0]
    assert sample_indices(8, 30.0, FrameSampling(start=0.2, end=3.1), times) == [2, 3, 4]
    assert sample_indices(8, 30.0, FrameSampling(fps=1.0, start=3.05), times) == [4, 6]  # 4 steps of 1.5 s
    assert sample_indices(8, 30.0, FrameSampling(start=3.0, max_duration=0.15), times) == [3, 4]
    assert usable_range(8, 30.0, FrameSampling(start=0.15, end=3.15), times) == (range(2, 5), pytest.approx(3.2 - 0.2))


@pytest.mark.parametrize(("start", "end"), [(4.0, None), (0.0, 1e-9), (1.01, 1.02), (9.0, 12.0)])
def test_a_cut_without_frames_is_refused(start, end):
    if start:
        with pytest.raises(
            InputError, match=r"(video_start is .* s, but the video lasts only 3.00 s|no frame lies from 1.01 s to 1.02 s)"
        ):
            sample_indices(30, 10.0, FrameSampling(start=start, end=end))
    else:
        assert sample_indices(30, 10.0, FrameSampling(start=start, end=end)) == [0]
    with pytest.raises(InputError, match="video_start or video_end is set but the video's own frame rate is unknown"):
        sample_indices(30, None, FrameSampling(start=start, end=end))


@given(st.integers(1, 300), st.sampled_from([10.0, 23.976, 25.0, 30.0]), st.sampled_from([0.5, 2.0, 7.0]))
def test_timestamps_of_a_constant_rate_change_nothing(total, source, fps):
    policy = FrameSampling(fps=fps, min_frames=4, max_frames=64, multiple=2)
    millis = [round(i / source, 3) for i in range(total)]  # as Matroska rounds them
    assert sample_indices(total, source, policy, millis) == sample_indices(total, source, policy)


def test_a_variable_rate_takes_the_frames_on_screen():
    times = [0.0, 0.1, 0.2, 3.0, 3.1, 3.2, 3.3, 8.0]  # 9.14 s with the last frame's share
    assert sample_indices(8, 30.0, FrameSampling(fps=0.5), times) == [0, 2, 6]  # at 0, 2.3, 4.6 and 6.9 s
    assert sample_indices(8, 30.0, FrameSampling(fps=1.0), times) == [0, 2, 6, 7]
    assert sample_indices(8, 30.0, FrameSampling(fps=0.5, multiple=2), times) == [0, 1, 2, 6]  # one is added
    assert sample_indices(8, 30.0, FrameSampling(fps=0.5, max_frames=2), times) == [0, 6]
    assert sample_indices(8, 30.0, FrameSampling(fps=0.5, spread="ends"), times) == [0, 2, 6, 7]
    assert sample_indices(8, 30.0, FrameSampling(fps=1.0, max_duration=3.05), times) == [0, 2]
    assert sample_indices(8, 30.0, FrameSampling(num_frames=4), times) == [0, 2, 4, 6]  # counts frames, not seconds
    assert sample_indices(8, None, FrameSampling(fps=1.0), times) == [0, 2, 6, 7]  # no rate is needed
    assert sample_indices(1, None, FrameSampling(num_frames=1), [0.0]) == [0]
    assert usable_range(8, 30.0, FrameSampling(), times)[1] == pytest.approx(8 * 8 / 7)


@given(
    st.lists(st.floats(0.001, 5), min_size=1, max_size=60),
    st.floats(0.1, 60),
    st.integers(1, 4),
    st.sampled_from(["stride", "ends"]),
)
def test_indices_of_a_variable_rate_are_ascending_and_in_range(gaps, fps, multiple, spread):
    times = [0.0, *itertools.accumulate(gaps)]
    policy = FrameSampling(fps=fps, multiple=multiple, min_frames=3, max_frames=16, spread=spread)
    assume(len(times) >= multiple)
    got = sample_indices(len(times), 24.0, policy, times)
    assert got == sorted(set(got))
    assert 0 <= got[0] <= got[-1] < len(times)
    assert len(got) % multiple == 0
    assert min(3 // multiple * multiple, len(times)) <= len(got) <= 16


@given(st.integers(1, 20_000), st.floats(0.5, 240), st.integers(1, 128))
def test_frames_of_spread_before_are_those_of_a_list_of_all_steps(total, rate, most):
    seconds = total / rate
    assume(seconds > most and seconds >= 0.1)
    steps = [int(round(i * 0.1, 1) * rate) for i in range(int(seconds / 0.1))]
    places = np.linspace(0, len(steps) - 1, min(most, len(steps)), dtype=int)
    want = sorted({min(steps[i], total - 1) for i in places})
    assert sample_indices(total, rate, FrameSampling(fps=1.0, max_frames=most, spread="before")) == want


@pytest.mark.parametrize("rate", [1e-3, 1e-9, 1e-25])
def test_a_claimed_duration_costs_no_memory(rate):
    policy = FrameSampling(fps=1.0, max_frames=64, spread="before")
    tracemalloc.start()
    try:
        chosen = sample_indices(100_000, rate, policy)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(chosen) == 64
    assert (chosen[0], chosen[-1]) == (0, 99_999)


def test_an_infinite_claimed_duration_gives_frames():
    assert sample_indices(100_000, 5e-324, FrameSampling(fps=1.0, max_frames=64, spread="before"))
