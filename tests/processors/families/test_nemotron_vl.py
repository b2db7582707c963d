"""Nemotron-Nano-VL's videos and options, Eagle2.5-VL's numbers of images and its videos, and Nemotron-Parse's prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import small_tokenizer
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.geometry import pixel_shuffle_side, sample_indices
from sensorium.mm.tiling.aspect import AspectTiles
from sensorium.mm.tiling.whole import FixedSize, PatchRange, PatchTarget
from sensorium.mm.types import FramePlan, MediaHeader, VideoItem
from sensorium.models.families.eagle2_5_vl.processing import EagleVLProcessingInfo
from sensorium.models.families.nemotron_parse.processing import NemotronParseProcessingInfo
from sensorium.models.families.nemotron_vl.processing import NemotronVLProcessingInfo
from sensorium.processors.files import ProcessorFiles

DYNAMIC = {"args": {"min_num_patches": 1024, "max_num_patches": 13312}}


def files_of(config: dict[str, Any], *specials: str) -> ProcessorFiles:
    tok = small_tokenizer(specials)
    return ProcessorFiles(
        config,
        encode=lambda text: tok.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: tok.decode(list(ids), skip_special_tokens=True),
        token_to_id=tok.token_to_id,
    )


def nano(vision: dict[str, Any] | None = None, *options: dict[str, Any], **config: Any) -> NemotronVLProcessingInfo:
    files = files_of({"vision_config": vision or {}, **config}, "<image>", "<img>", "</img>")
    return NemotronVLProcessingInfo(files, *options)


def test_a_video_that_is_no_token_has_an_id_outside_the_vocabulary() -> None:
    info = nano(video_context_token_id=131081, llm_config={"vocab_size": 640})
    ids = info.files.encode("Look: <video> Who?")
    assert info.text_placeholders == {"<video>": 131081}
    found = info.preprocess_prompt(ids, {"video": 1})
    assert [token for token in found if token == 131081] == [131081]
    assert info.files.decode([token for token in found if token != 131081]) == "Look:  Who?"
    assert info.preprocess_prompt(ids, {"image": 1}) is ids
    with pytest.raises(ConfigError, match=r"lacks <video>, and video_context_token_id in config\.json is None"):
        nano()


def test_times_are_whole_milliseconds_per_frame() -> None:
    """30 frames a second are 33 ms each, so that frame 300 is at 9.90 s."""
    info = nano(video_context_token_id=999)
    plan = FramePlan((0, 150, 300), (0.0, 5.0, 10.0), 301, 0.3)
    grid = info.geometry(MediaHeader("video", 64, 64, plan))
    assert grid.times == (0.0, 4.95, 9.9)
    text = info.files.decode(info.span("video", grid).token_ids)
    assert text == "".join(
        f"{start}Frame {number} sampled at {time} seconds: "
        for start, number, time in [("", 1, "0.00"), ("\n", 2, "4.95"), ("\n", 3, "9.90")]
    )


def test_config_says_how_images_and_frames_are_resized() -> None:
    known = {"video_context_token_id": 999}
    assert nano(**known).specs["image"].tiling == AspectTiles((512, 512), 1, 12)
    assert nano({}, {"max_num_tiles": 3}, **known).specs["image"].tiling.max_tiles == 3
    assert nano(**known).specs["video"].tiling == FixedSize((512, 512))
    assert nano({"video_target_img_size": 448}, **known).specs["video"].tiling == FixedSize((448, 448))
    kept = {"video_target_num_patches": 1024, "video_maintain_aspect_ratio": True}
    assert nano(kept, **known).specs["video"].tiling == PatchTarget(16, 2, 1024)
    assert nano(DYNAMIC, **known).specs["image"].tiling == PatchRange(16, 2, 1024, 13312)
    assert nano(DYNAMIC, {"max_num_patches": 4000}, **known).specs["image"].tiling.max_patches == 4000
    assert nano(DYNAMIC, max_sequence_length=2052, **known).specs["image"].tiling.max_patches == 8192
    with pytest.raises(ConfigError, match="give a maximum of at least 2048"):
        nano(DYNAMIC, {"max_num_patches": 2000}, **known)
    with pytest.raises(ConfigError, match="give max_num_patches"):
        nano(DYNAMIC, {"max_num_tiles": 2}, **known)
    with pytest.raises(ConfigError, match="give max_num_tiles"):
        nano({}, {"max_num_patches": 4000}, **known)


def test_images_of_eagle_have_their_numbers() -> None:
    files = files_of({"vision_config": {"image_size": 448}}, "<IMG_CONTEXT>", "<img>", "</img>")
    info = EagleVLProcessingInfo(files)
    image, ids = info.placeholder_ids["image"], files.encode("See <image-1> and<image-2>?")
    made = info.preprocess_prompt(ids, {"image": 2})
    assert made == [
        *files.encode("See <image 1>"), image, *files.encode(" and<image 2>"), image, *files.encode("?"),
    ]  # fmt: skip
    expanded = [*files.encode("<image 1>"), *[image] * 3]
    assert info.preprocess_chat(expanded, {"image": 1}) is expanded
    with pytest.raises(ConfigError, match="pad_during_tiling"):
        EagleVLProcessingInfo(ProcessorFiles(files.config, {"pad_during_tiling": True}, token_to_id=files.token_to_id))


@pytest.mark.parametrize(
    ("text", "found", "wanted"), [("<image-2> and <image-1>", 2, 1), ("<image-1><image-1>", 1, 2), ("<image-0>", 0, 1)]
)
def test_numbers_of_eagles_images_ascend_from_1(text: str, found: int, wanted: int) -> None:
    files = files_of({"vision_config": {"image_size": 448}}, "<IMG_CONTEXT>", "<img>", "</img>")
    message = f"the prompt has <image-{found}> in place of image {wanted}; write <image-{wanted}>"
    with pytest.raises(InputError, match=message):
        EagleVLProcessingInfo(files).preprocess_prompt(files.encode(text), {"image": 2})


def test_numbers_of_eagles_images_count_placeholder_tokens() -> None:
    files = files_of({"vision_config": {"image_size": 448}}, "<IMG_CONTEXT>", "<img>", "</img>")
    info = EagleVLProcessingInfo(files)
    image = info.placeholder_ids["image"]
    made = info.preprocess_prompt([image, *files.encode("a <image-2>")], {"image": 2})
    assert made == [*files.encode("<image 1>"), image, *files.encode("a <image 2>"), image]


def test_pruned_videos_keep_a_share_of_their_rows_and_all_text() -> None:
    plan = FramePlan((0, 1, 2, 3), (0.0, 1.0, 2.0, 3.0), 4, 1.0)
    header, config = MediaHeader("video", 512, 512, plan), {"video_context_token_id": 999}
    whole = nano(**config).span("video", nano(**config).geometry(header))
    for rate, kept in ((0.5, 512), (0.9, 256)):  # of 4 x 256 rows; never less than one frame
        info = nano(video_pruning_rate=rate, **config)
        grid = info.geometry(header)
        assert grid.num_embeds == whole.num_tokens - 4 * 256 + kept
        span = info.span("video", grid)
        assert span.token_ids == (info.placeholder_ids["image"],) * grid.num_embeds
        kwargs, _ = info.process(VideoItem(torch.zeros(4, 512, 512, 3, dtype=torch.uint8), plan), torch.float32)
        assert len(kwargs["text_ids"].data) + kept == grid.num_embeds
        few = info.shrink_kwargs("video", (4, 32, 32), 700)
        assert few == {"num_frames": 2}


@pytest.mark.parametrize("rate", [1, -0.1, "0.5", True])
def test_other_pruning_rates_are_refused(rate: object) -> None:
    with pytest.raises(ConfigError, match="video_pruning_rate"):
        nano(video_context_token_id=999, video_pruning_rate=rate)


def eagle() -> EagleVLProcessingInfo:
    config = {"vision_config": {"image_size": 448}, "text_config": {"vocab_size": 640}}
    return EagleVLProcessingInfo(files_of(config, "<IMG_CONTEXT>", "<img>", "</img>"))


def test_eagles_videos_say_which_they_are_their_rate_and_the_time_of_each_frame() -> None:
    info = eagle()
    assert info.placeholder_ids["video"] == 640
    ids, encode, video = info.files.encode("A<video-1><image-1>B<video-2>"), info.files.encode, 640
    image = info.placeholder_ids["image"]
    made = [*encode("AThe first video"), video, *encode("<image 1>"), image, *encode("BThe second video"), video]
    assert info.preprocess_prompt(ids, {"image": 1, "video": 2}) == made
    grid = info.geometry(MediaHeader("video", 300, 200, FramePlan((0, 29), (0.0, 29 / 30), 30, 2.0)))
    assert (grid.t, grid.h, grid.w) == (2, 28, 28)
    text = info.files.decode(info.span("video", grid).token_ids)
    assert text == " sampled with 2.00 fps: Frame 1 sample at 0.00s: Frame 2 sample at 0.97s: "


def test_frames_of_eagles_videos_are_sampled_as_published() -> None:
    sampling = eagle().decode_spec.sampling
    assert sample_indices(31, 30.0, sampling) == [0, 10, 20, 30]
    assert sample_indices(9000, 30.0, sampling) == [round(i) for i in np.linspace(0, 8999, 256)]


@pytest.mark.parametrize(
    ("text", "videos", "message"),
    [
        ("<video-2>", 1, "the prompt has <video-2> in place of video 1; write <video-1>"),
        ("".join(f"<video-{i}>" for i in range(1, 12)), 11, "11 videos are given; this model takes at most 10"),
    ],
)
def test_bad_numbers_of_eagles_videos_are_refused(text: str, videos: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        eagle().preprocess_prompt(eagle().files.encode(text), {"video": videos})


@pytest.mark.parametrize("ratio", [0, "0.5", None, True, 0.4, 2, -0.5, float("nan")])
def test_other_ratios_are_refused(ratio: object) -> None:
    with pytest.raises(ConfigError, match="downsample_ratio"):
        nano(video_context_token_id=999, downsample_ratio=ratio)
    with pytest.raises(ConfigError, match="downsample_ratio"):
        EagleVLProcessingInfo(files_of({"downsample_ratio": ratio}, "<IMG_CONTEXT>", "<img>", "</img>"))


def test_ratios_are_read_with_few_digits() -> None:
    assert [pixel_shuffle_side({"downsample_ratio": ratio}) for ratio in (1, 0.5, 0.33, 0.3333333)] == [1, 2, 3, 3]
    assert pixel_shuffle_side({}) == 2


@pytest.mark.parametrize(
    ("vision", "config", "said"),
    [
        ({"video_target_num_patches": 64, "video_target_img_size": 448}, {}, "num_patches and video_target_img_size"),
        ({"args": {"min_num_patches": 1024, "max_num_patches": "many"}}, {}, "max_num_patches is 'many'"),
        ({"args": {"min_num_patches": 1024, "max_num_patches": 0}}, {}, "max_num_patches is 0"),
        ({"patch_size": "16"}, {}, "patch_size is '16'"),
        ({"patch_size": None}, {}, "patch_size is None"),
        ({}, {"patch_size": 0}, "patch_size is 0"),
    ],
)
def test_bad_values_of_nemotrons_config_are_refused(vision: dict[str, Any], config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nano(vision, video_context_token_id=999, **config)


def test_prompts_of_nemotron_parse_begin_with_the_decoders_first_token() -> None:
    info = NemotronParseProcessingInfo(ProcessorFiles({"decoder_start_token_id": 7, "decoder": {"vocab_size": 99}}))
    assert info.preprocess_prompt([5, 6], {"image": 1}) == [7, 5, 6]
    assert info.preprocess_prompt([7, 5, 6], {"image": 1}) == [7, 5, 6]
    grid = info.geometry(MediaHeader("image", 3000, 2000))
    assert grid.num_embeds == 128 * 25 + 1
    assert info.span("image", grid).num_tokens == 0
