"""InternVL's processor against transformers' own: pixels, token ids of whole prompts, frames of videos."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import tokenizer
from sensorium.callers.errors import ConfigError
from sensorium.mm.geometry import FrameSampling, sample_indices
from sensorium.mm.types import FramePlan, ImageItem, ItemGeometry, MediaHeader, VideoItem
from sensorium.models.families.internvl.processing import InternVLProcessingInfo, QianfanOcrProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out
from tokenizers import AddedToken, Tokenizer

SIDES = (1, 30, 57, 112, 333, 640, 1999)
SPECIALS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
}  # fmt: skip


def words() -> Tokenizer:
    tok = Tokenizer.from_str(tokenizer().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS.values()])
    return tok


def published(**image: Any) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    size = {"height": 56, "width": 56}
    tok = PreTrainedTokenizerFast(tokenizer_object=words(), extra_special_tokens=SPECIALS)
    images, videos = GotOcr2ImageProcessor(size=size, **image), InternVLVideoProcessor(size=size)
    return InternVLProcessor(images, tok, videos, image_seq_length=4, chat_template="")


def info_of(image: dict | None = None, *options: dict, **changes: Any) -> InternVLProcessingInfo:
    tok, size = words(), {"size": {"height": 56, "width": 56}}
    config = {
        "image_token_id": tok.token_to_id("<IMG_CONTEXT>"),
        "vision_config": {"image_size": [56, 56], "patch_size": [14, 14]},
        "text_config": {"hidden_size": 64, "vocab_size": tok.get_vocab_size()},
    }
    files = ProcessorFiles(
        config | changes, {**size, **(image or {})}, size,
        encode=lambda text: tok.encode(text, add_special_tokens=False).ids, token_to_id=tok.token_to_id,
        decode=lambda ids: tok.decode(ids, skip_special_tokens=True),
    )  # fmt: skip
    return InternVLProcessingInfo(files, *options)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def clip(frames: int, height: int, width: int) -> VideoItem:
    plan = FramePlan(tuple(range(frames)), tuple(map(float, range(frames))), frames, 1.0)
    return VideoItem(noise(frames, height, width, 3), plan)


def planes(kwargs: Any) -> torch.Tensor:
    """Return patches as tiles `[tiles, 3, 56, 56]`."""
    patches = kwargs["pixel_values"].data.view(-1, 2, 2, 2, 2, 3, 14, 14)
    return patches.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 56, 56)


@pytest.mark.parametrize("image", [{}, {"max_patches": 4}, {"min_patches": 2, "max_patches": 6, "resample": 2}])
def test_pixels_and_counts_equal(image):
    oracle, info = published(**image), info_of(image)
    for seed, size in enumerate((tall, wide) for tall in SIDES[1:5] for wide in SIDES[1:5]):
        item = ImageItem(noise(*size, 3, seed=seed))
        want = oracle(images=[item.pixels.numpy()], text="<IMG_CONTEXT>", return_tensors="pt")
        kwargs, grid = info.process(item, torch.float32)
        torch.testing.assert_close(planes(kwargs), want["pixel_values"], atol=2e-6, rtol=0)
        assert grid == info.geometry(item.header)
        assert list(info.span("image", grid).token_ids) == want["input_ids"][0].tolist(), size


@pytest.mark.parametrize("image", [{}, {"max_patches": 4}])
def test_counts_equal_for_extreme_sizes(image):
    oracle, info = published(**image), info_of(image)
    sizes = [(tall, wide) for tall in SIDES for wide in SIDES]
    want = oracle._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    geometries = [info.geometry(MediaHeader("image", *size)) for size in sizes]
    assert [len(info.span("image", grid).token_ids) for grid in geometries] == want


def test_a_whole_prompt_with_images_and_videos():
    oracle, info = published(), info_of()
    one, film, two = ImageItem(noise(60, 130, 3)), clip(3, 40, 70), ImageItem(noise(56, 56, 3))
    text = "<|im_start|>user\n<IMG_CONTEXT>\n<video>\nWhat <IMG_CONTEXT> then?<|im_end|>"
    images, videos = [one.pixels.numpy(), two.pixels.numpy()], [film.frames.numpy()]
    want = oracle(images=images, videos=videos, text=text, return_tensors="pt")
    made = {"image": [info.process(one, torch.float32), info.process(two, torch.float32)]}
    made["video"] = [info.process(film, torch.float32)]
    spans = {name: [[info.span(name, grid)] for _, grid in several] for name, several in made.items()}
    placeholders = info.preprocess_prompt(words().encode(text, add_special_tokens=False).ids, {"image": 2, "video": 1})
    ids, ranges = lay_out(placeholders, spans, info.placeholder_ids).expand()
    assert list(ids) == want["input_ids"][0].tolist()
    in_order = torch.cat([planes(made["image"][0][0]), planes(made["video"][0][0]), planes(made["image"][1][0])])
    torch.testing.assert_close(in_order, want["pixel_values"], atol=2e-6, rtol=0)
    assert ranges["video"][0][0].num_embeds == 3 * 4
    embeds = torch.tensor(ids) == info.placeholder_ids["image"]
    marked = torch.zeros_like(embeds)
    for where in (one for several in ranges.values() for each in several for one in each):
        marked[where.offset : where.end] = where.mask()
    assert torch.equal(marked, embeds)


def test_frames_are_those_in_the_middle():
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
    from transformers.video_utils import VideoMetadata

    oracle, policy = InternVLVideoProcessor(), info_of(None, {"num_frames": 7}).decode_spec.sampling
    for total in (7, 8, 26, 100, 1001):
        want = oracle.sample_frames(VideoMetadata(total_num_frames=total, fps=25.0), num_frames=7).tolist()
        assert sample_indices(total, 25.0, policy) == want
        fast = info_of(None, {"fps": 5}).decode_spec.sampling
        count = math.floor(total / 25.0 * 5)
        if count:
            want = oracle.sample_frames(VideoMetadata(total_num_frames=total, fps=25.0), fps=5).tolist()
            assert sample_indices(total, 25.0, fast) == want[:count]
    usual = info_of().decode_spec.sampling
    assert usual == FrameSampling(max_frames=8, spread="middle")
    assert sample_indices(5, None, usual) == [0, 1, 2, 3, 4]
    assert sample_indices(26, None, usual) == [1, 4, 8, 11, 14, 17, 21, 24]


def test_options_make_fewer_tiles():
    info, header = info_of(), MediaHeader("image", 300, 900)
    assert info.geometry(header).tiles == (2, 6)
    for options in ({"detail": "low"}, {"crop_to_patches": False}, {"max_patches": 1}):
        assert info.with_kwargs(options).geometry(header) == ItemGeometry(1, 4, 4, 2)
    for rows in range(4, 60):
        options = info.shrink_kwargs("image", (13, 4, 4), rows)
        assert info.with_kwargs(options or {}).geometry(header).num_embeds <= rows
    assert info.shrink_kwargs("image", (13, 4, 4), 3) is None
    assert info.shrink_kwargs("image", (1, 4, 4), 4) is None
    assert info.shrink_kwargs("video", (8, 4, 4), 13) == {"num_frames": 3}
    assert info.options_key("image") != info.with_kwargs({"max_patches": 3}).options_key("image")
    assert info.options_key("video") == info.with_kwargs({"max_patches": 3}).options_key("video")


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        ({"size": {"height": 70, "width": 70}}, {}, "image_size"),
        ({"size": {"height": "x"}}, {}, "a height and a width"),
        ({}, {"max_patches": 0}, "positive integer"),
        ({"min_patches": 5}, {"max_patches": 4}, "not below the minimum"),
        ({}, {"detail": "vague"}, "low"),
        ({}, {"max_tiles": 3}, "unknown processing option"),
    ],
)
def test_invalid_settings_are_refused(image, options, said):
    with pytest.raises(ConfigError, match=said):
        info_of(image, options)


def test_tokens_come_from_the_tokenizer():
    bare = ProcessorFiles({"image_token_id": 5, "vision_config": {"image_size": 384}})
    with pytest.raises(ConfigError, match="checkpoint's tokenizer"):
        InternVLProcessingInfo(bare)
    with pytest.raises(ConfigError, match="lacks the token <video>"):
        InternVLProcessingInfo(ProcessorFiles(bare.config, token_to_id=lambda text: None))


@pytest.mark.parametrize(("image", "limits"), [({}, (2, 5)), ({"min_patches": 1, "max_patches": 7}, (1, 7))])
def test_qianfan_ocr_reads_limits_of_config_json(image: dict, limits: tuple[int, int]) -> None:
    own = info_of()
    config = {**own.files.config, "min_dynamic_patch": 2, "max_dynamic_patch": 5}
    tiling = (
        QianfanOcrProcessingInfo(replace(own.files, config=config, image={**own.files.image, **image})).specs["image"].tiling
    )
    assert (tiling.min_tiles, tiling.max_tiles) == limits
