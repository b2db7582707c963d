"""Keye's processing beyond the parity suite: published bounds of videos, slow and fast frames, refused options."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from family import load_rows, save
from oracle import SPECIALS, small_tokenizer
from sensorium import LLM, Media, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import FramePlan, MediaHeader, VideoItem
from sensorium.models.families.keye.processing import Keye15ProcessingInfo, KeyeProcessingInfo, compare_frames
from sensorium.models.families.keye.rules import steps_of
from sensorium.processors.files import ProcessorFiles

WORDS = small_tokenizer((*SPECIALS, "<|frame|>", "<|fast_start|>", "<|fast_end|>"))
JSON = {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2}


def made(kind=Keye15ProcessingInfo, words=WORDS, tokens_per_second=2, **options):
    ids = {f"{name}_token_id": words.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    config = {
        **ids,
        "vocab_size": 700,
        "hidden_size": 8,
        "vision_config": {"patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": tokens_per_second},
    }
    files = ProcessorFiles(config, JSON, encode=lambda text: words.encode(text).ids, token_to_id=words.token_to_id)
    return kind(files, options)


def clip(count, size=(480, 640), fps=2.0):
    return MediaHeader("video", *size, FramePlan(tuple(range(count)), tuple(i / fps for i in range(count)), count, fps))


def test_bounds_of_videos_are_those_of_the_published_utility() -> None:
    """The image processor's bounds do not apply to frames, which the utility has resized before."""
    info = made(KeyeProcessingInfo)
    assert info.specs["image"].max_pixels == 1003520
    grid = info.geometry(clip(10, fps=4.0))
    assert (grid.t, grid.h, grid.w, grid.time_step) == (10, 34, 46, 0.5)
    assert info.geometry(clip(4, (60, 60))).num_embeds == 4 * 144  # at least 128 rows per frame
    assert info.decode_spec.sampling.multiple == 2
    long = info.geometry(clip(768, (720, 1280)))  # all frames share 115,200 rows, counted two by two
    assert long.num_embeds == 768 * 12 * 23


@pytest.mark.parametrize("value", ["2", 0, None, True])
def test_tokens_per_second_is_a_number_above_0(value):
    with pytest.raises(ConfigError, match="tokens_per_second"):
        made(KeyeProcessingInfo, tokens_per_second=value).geometry(clip(4))


def test_fast_frames_have_three_tenths_of_the_rows() -> None:
    info = made(frame_types=[0, 1, 1])
    grid = info.geometry(clip(3))
    assert [(step.h, step.w) for step in steps_of(grid)] == [(34, 46), (18, 24), (18, 24)]
    assert (grid.t, grid.h, grid.w, grid.num_embeds) == (3, 34, 46, 391 + 2 * 108)
    runs = [(run.repeat, run.is_embed) for run in info.span("video", grid).runs() if run.is_embed]
    assert runs == [(391, True), (108, True), (108, True)]
    ids = info.span("video", grid).token_ids
    assert [ids.count(token) for token in (info.frame, info.fast_start, info.fast_end)] == [3, 2, 2]
    assert WORDS.decode([one for one in ids if one != info.placeholder_ids["video"]], skip_special_tokens=True) == "0.00.51.0"


def test_small_frames_are_fast_without_being_smaller() -> None:
    info = made(frame_types=[0, 1])
    grid = info.geometry(clip(2, (60, 60)))
    assert [(step.h, step.w) for step in steps_of(grid)] == [(14, 14), (14, 14)]
    assert info.span("video", grid).token_ids.count(info.fast_start) == 1


def test_all_frames_of_a_long_video_share_the_published_total() -> None:
    assert made().decode_spec.sampling.max_frames == 1365
    grid = made().geometry(clip(1365, (720, 1280)))
    assert (grid.h, grid.w, steps_of(grid)) == (10, 18, [])


def test_images_take_no_timestamp() -> None:
    info = made()
    assert info.span("image", info.geometry(MediaHeader("image", 56, 84))).num_tokens == 6


@pytest.mark.parametrize("types", [[], [0, 2], [0, True], "01", 1, np.array([0, 1])], ids=repr)
def test_wrong_types_of_frames_are_refused(types) -> None:
    with pytest.raises(ConfigError, match="frame_types"):
        made(frame_types=types)


def test_types_of_frames_must_be_as_many_as_frames() -> None:
    with pytest.raises(InputError, match="frame_types has 2 entries, but 3 frames are used"):
        made(frame_types=[0, 1]).geometry(clip(3))


def test_frames_with_types_are_not_dropped_to_shrink_a_video() -> None:
    assert made(frame_types=[0] * 64).shrink_kwargs("video", (64, 34, 46), 64) is None
    kwargs = made().shrink_kwargs("video", (64, 34, 46), 512)
    assert kwargs is not None
    assert made(**kwargs).geometry(clip(kwargs["num_frames"])).num_embeds <= 512


def test_a_tokenizer_without_the_frame_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="frame"):
        made(words=small_tokenizer(SPECIALS))


def scenes(*changes: float, size: tuple[int, int] = (112, 168)) -> np.ndarray:
    """Return frames, each of which replaces about this share of the squares of the frame before."""
    rng = np.random.default_rng(0)

    def noise() -> np.ndarray:
        colour = np.zeros((size[0] // 28, size[1] // 28, 3), np.uint8)
        colour[..., :] = rng.choice([0, 255], colour.shape)
        return colour.repeat(28, 0).repeat(28, 1)

    frames = [noise()]
    for share in changes:
        frame, other = frames[-1].copy(), noise()
        lines = round(share * size[0])
        frame[:lines] = other[:lines]
        frames.append(frame)
    return np.stack(frames)


def published_types(frames: np.ndarray, threshold: float) -> tuple[int, ...]:
    """Compare frames of whole squares, of which none is resized, as `extract_slow_fast_frames` of keye_vl_utils does."""

    def squares(frame: np.ndarray) -> np.ndarray:
        hsv = cv2.cvtColor(frame, cv2.COLOR_RGB2HSV).astype(np.float64)
        lines, columns = (side // 28 for side in hsv.shape[:2])
        return np.stack([hsv[28 * i : 28 * i + 28, 28 * j : 28 * j + 28].ravel() for i in range(lines) for j in range(columns)])

    types, last = [0], squares(frames[0])
    for frame in frames[1:]:
        here = squares(frame)
        norms = np.linalg.norm(last, axis=1), np.linalg.norm(here, axis=1)
        lit = (norms[0] > 0.01) | (norms[1] > 0.01)
        cosines = (last * here).sum(1)[lit] / ((norms[0] + 1e-8) * (norms[1] + 1e-8))[lit]
        slow = (cosines > 0.7).mean() < threshold
        types.append(int(not slow))
        last = here if slow else last
    return tuple(types)


@pytest.mark.parametrize("threshold", [0.9, 0.6])
def test_frames_are_compared_as_published(threshold: float) -> None:
    frames = scenes(0.0, 0.1, 0.25, 0.5, 1.0, 0.0, 0.25, 0.25, 0.25, 1.0, size=(224, 280))
    found = compare_frames(torch.from_numpy(frames), threshold)
    assert found == published_types(frames, threshold)
    assert 0 < sum(found) < len(found) - 1


def test_black_frames_are_fast() -> None:
    assert compare_frames(torch.zeros(3, 60, 90, 3, dtype=torch.uint8), 0.9) == (0, 1, 1)


def test_rows_of_compared_frames_stay_below_the_plan() -> None:
    info = made(frame_types="auto")
    for size in ((112, 168), (720, 1280)):
        frames = torch.from_numpy(scenes(0.0, 0.0, 1.0, 0.0, size=(112, 168)))
        frames = frames.repeat(1, size[0] // 112 + 1, size[1] // 168 + 1, 1)[:, : size[0], : size[1]]
        item = VideoItem(frames, clip(len(frames), size).frames)
        assert not info.is_exact(item.header)
        settled = info.for_item(item)
        grid = settled.geometry(item.header)
        assert grid == made(frame_types=[0, 1, 1, 0, 1]).geometry(item.header)
        assert grid.num_embeds <= info.geometry(item.header).num_embeds
        assert settled.process(item, torch.float32)[1] == grid
        assert settled.is_exact(item.header)
        assert info.span("video", grid).token_ids.count(info.fast_start) == 3
    long = clip(1365, (720, 1280))
    assert info.geometry(long).num_embeds >= made(frame_types=[0] + [1] * 1364).geometry(long).num_embeds


def test_answers_to_compared_frames_are_those_to_frames_of_these_types(tmp_path) -> None:
    llm = LLM(save(load_rows()["keye_vl1_5"], tmp_path), device="cpu", max_model_len=1024)
    params, frames = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), scenes(0.0, 1.0, 0.0)

    def ask(types: object) -> dict:
        video = Media((frames, {"fps": 2.0, "do_sample_frames": False}), frame_types=types)
        return {"prompt": "a<|video_pad|>b", "multi_modal_data": {"video": [video]}}

    found, expected, other = (llm.generate([ask(types)], params)[0] for types in ("auto", [0, 1, 0, 1], [0, 0, 0, 0]))
    assert found.prompt_token_ids == expected.prompt_token_ids != other.prompt_token_ids
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    (plan,) = llm.plan(ask("auto"))
    assert not plan.exact
    assert plan.num_tokens >= len(found.prompt_token_ids) - 2


def test_a_similarity_needs_frames_to_compare() -> None:
    with pytest.raises(ConfigError, match='min_frame_similarity needs frame_types="auto"'):
        made(min_frame_similarity=0.5)


def test_comparing_frames_leaves_nothing_behind() -> None:
    """Threads share an info, so what it finds in one video must not be kept in it."""
    info = made(frame_types="auto", min_frame_similarity=0.6)
    before = dict(vars(info))
    videos = [VideoItem(torch.from_numpy(scenes(*shares)), clip(3, (112, 168)).frames) for shares in ((0.0, 1.0), (1.0, 0.0))]
    assert [info.for_item(one).specs["video"].frame_types for one in videos] == [(0, 1, 0), (0, 0, 1)]
    assert vars(info) == before
    assert info.for_item(VideoItem(videos[0].frames, videos[0].header.frames)) is not info
    assert made().for_item(videos[0]).specs["video"].frame_types == ()
