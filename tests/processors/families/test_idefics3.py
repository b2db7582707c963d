"""Idefics3's and SmolVLM's processors against transformers' own: pixels, token ids with their tags, frames of videos."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from oracle import fast_tokenizer, small_tokenizer
from sensorium.callers.errors import ConfigError
from sensorium.mm.geometry import sample_indices
from sensorium.mm.types import FramePlan, ImageItem, MediaHeader, VideoItem
from sensorium.models.families.idefics3.processing import Idefics3ProcessingInfo, SmolVLMProcessingInfo, number_words
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out

SIDES = (1, 30, 57, 112, 333, 640, 1999)
TAGS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]  # others are written as text
SPECIALS = ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<eos>", *TAGS]
JSON = {"size": {"longest_edge": 200}, "max_image_size": {"longest_edge": 56}}
COUNTS = {1: "one", 3: "three", 5: "five"}


def published(monkeypatch: pytest.MonkeyPatch | None = None, **image: Any) -> Any:
    from transformers.models.idefics3 import image_processing_idefics3, processing_idefics3
    from transformers.models.smolvlm import processing_smolvlm, video_processing_smolvlm

    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>")
    images = image_processing_idefics3.Idefics3ImageProcessor(**JSON | image)
    if monkeypatch is None:
        return processing_idefics3.Idefics3Processor(images, words, image_seq_len=4, chat_template="")
    monkeypatch.setattr(processing_smolvlm, "num2words", COUNTS.get)  # a package that transformers leaves to the user
    videos = video_processing_smolvlm.SmolVLMVideoProcessor(**JSON)
    return processing_smolvlm.SmolVLMProcessor(images, words, videos, image_seq_len=4, chat_template="")


def info_of(cls: type, image: dict | None = None, *options: dict) -> Idefics3ProcessingInfo:
    tok = small_tokenizer(SPECIALS)
    config = {
        "image_token_id": tok.token_to_id("<image>"),
        "scale_factor": 2,
        "vision_config": {"image_size": 56, "patch_size": 14},
        "text_config": {"hidden_size": 64, "vocab_size": tok.get_vocab_size()},
    }
    files = ProcessorFiles(
        config, JSON | (image or {}), JSON, encode=lambda text: tok.encode(text, add_special_tokens=False).ids,
        token_to_id=tok.token_to_id, decode=lambda ids: tok.decode(ids, skip_special_tokens=True),
    )  # fmt: skip
    return cls(files, *options)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def planes(kwargs: Any) -> torch.Tensor:
    """Return patches as tiles `[tiles, 3, 56, 56]`."""
    patches = kwargs["pixel_values"].data.view(-1, 2, 2, 2, 2, 3, 14, 14)
    return patches.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 56, 56)


@pytest.mark.parametrize("image", [{}, {"do_image_splitting": False}, {"resample": 3, "size": {"longest_edge": 112}}])
def test_pixels_and_tokens_equal(image):
    oracle, info = published(**image), info_of(Idefics3ProcessingInfo, image)
    for seed, size in enumerate((tall, wide) for tall in SIDES[1:6] for wide in SIDES[1:6]):
        item = ImageItem(noise(*size, 3, seed=seed))
        want = oracle(images=[item.pixels.numpy()], text="<image>", return_tensors="pt")
        kwargs, grid = info.process(item, torch.float32)
        torch.testing.assert_close(planes(kwargs), want["pixel_values"][0], atol=2e-6, rtol=0)
        assert grid == info.geometry(item.header)
        assert list(info.span("image", grid).token_ids) == want["input_ids"][0].tolist(), size


def test_tokens_equal_for_extreme_sizes():
    oracle, info = published(), info_of(Idefics3ProcessingInfo)
    for size in ((tall, wide) for tall in SIDES for wide in SIDES):
        grid = info.geometry(MediaHeader("image", *size))
        want = oracle.replace_image_token({"rows": [[grid.tiles[0]]], "cols": [[grid.tiles[1]]]}, 0)
        ids = small_tokenizer(SPECIALS).encode(want, add_special_tokens=False).ids
        assert list(info.span("image", grid).token_ids) == ids, size


def test_tokens_per_tile_of_the_published_checkpoints():
    for patch, scale, tile, rows in ((14, 2, 364, 169), (16, 4, 512, 64)):
        config = {"scale_factor": scale, "vision_config": {"image_size": tile, "patch_size": patch}, "image_token_id": 3}
        info = Idefics3ProcessingInfo(ProcessorFiles(config, {"max_image_size": {"longest_edge": tile}}))
        grid = info.geometry(MediaHeader("image", 900, 1400))
        assert grid.num_embeds == (grid.tiles[0] * grid.tiles[1] + 1) * rows


def test_a_whole_prompt_with_images():
    oracle, info = published(), info_of(Idefics3ProcessingInfo)
    items = [ImageItem(noise(60, 130, 3)), ImageItem(noise(40, 40, 3, seed=1))]
    text = "User:<image>and<image>\nWhat?<end_of_utterance>"
    want = oracle(images=[item.pixels.numpy() for item in items], text=text, return_tensors="pt")
    made = [info.process(item, torch.float32) for item in items]
    placeholders = small_tokenizer(SPECIALS).encode(text, add_special_tokens=False).ids
    ids, ranges = lay_out(
        placeholders, {"image": [[info.span("image", grid)] for _, grid in made]}, info.placeholder_ids
    ).expand()
    assert list(ids) == want["input_ids"][0].tolist()
    marked = torch.zeros(len(ids), dtype=torch.bool)
    for (where,) in ranges["image"]:
        marked[where.offset : where.end] = where.mask()
    assert torch.equal(marked, torch.tensor(ids) == info.placeholder_ids["image"])


@pytest.mark.parametrize(("frames", "seconds"), [(1, 0.5), (3, 75.0), (5, 3725.0)])
def test_videos_equal(monkeypatch, frames, seconds):
    from transformers.video_utils import VideoMetadata

    oracle, info = published(monkeypatch), info_of(SmolVLMProcessingInfo)
    pixels, total = noise(frames, 70, 100, 3), 10 * frames
    fps = total / seconds
    indices = list(range(0, total, 10))
    plan = FramePlan(tuple(indices), tuple(i / fps for i in indices), total, frames / seconds)
    kwargs, grid = info.process(VideoItem(pixels, plan), torch.float32)
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=seconds, frames_indices=indices)
    for text in ("<video>", "User: <video>What is it?", "a<video>\n", "<eos><video> b", "<video><eos>"):
        want = oracle(videos=[pixels.numpy()], text=text, video_metadata=[metadata], return_tensors="pt")
        placeholders = info.preprocess_prompt(
            small_tokenizer(SPECIALS).encode(text, add_special_tokens=False).ids, {"video": 1}
        )
        ids, _ = lay_out(placeholders, {"video": [[info.span("video", grid)]]}, info.placeholder_ids).expand()
        assert list(ids) == want["input_ids"][0].tolist(), text
    torch.testing.assert_close(planes(kwargs), want["pixel_values"][0], atol=2e-6, rtol=0)
    assert grid.num_embeds == frames * 4


def test_frames_are_those_of_the_published_processor():
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    oracle, policy = SmolVLMVideoProcessor(), info_of(SmolVLMProcessingInfo).decode_spec.sampling
    for fps in (25.0, 29.97, 10.0):
        for total in (1, 7, 26, 38, 250, 1501, 1700, 2500, 10_000):
            duration = float(Fraction(total) / Fraction(fps))
            metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=duration)
            want = oracle.sample_frames(metadata, num_frames=64, fps=1).tolist()
            assert sample_indices(total, fps, policy) == want, (fps, total)


def test_older_checkpoints_keep_video_options_in_the_image_file():
    json = {"video_sampling": {"fps": 2, "max_frames": 5, "video_size": {"longest_edge": 60}}}
    files = info_of(SmolVLMProcessingInfo, json).files
    info = SmolVLMProcessingInfo(
        ProcessorFiles(files.config, files.image, {}, encode=files.encode, token_to_id=files.token_to_id)
    )
    sampling = info.decode_spec.sampling
    assert (sampling.fps, sampling.max_frames) == (2, 5)
    assert info.specs["video"].tiling.longest == 60
    assert info.specs["image"].tiling.longest == 200


def test_options_make_fewer_tiles():
    info, header = info_of(Idefics3ProcessingInfo), MediaHeader("image", 300, 900)
    assert info.geometry(header).tiles == (2, 4)
    assert info.with_kwargs({"detail": "low"}).geometry(header).tiles == (0, 0)
    assert info.with_kwargs({"size": {"longest_edge": 112}}).geometry(header).tiles == (1, 2)
    for rows in range(4, 80):
        options = info.shrink_kwargs("image", (9, 4, 4), rows)
        assert info.with_kwargs(options or {}).geometry(header).num_embeds <= rows
    assert info.shrink_kwargs("image", (1, 4, 4), 4) is None


def test_images_that_keep_their_size_take_no_size():
    kept = info_of(Idefics3ProcessingInfo, {"do_resize": False})
    with pytest.raises(ConfigError, match=r"size resizes images.*do_resize=false"):
        kept.with_kwargs({"size": {"longest_edge": 100}})
    assert kept.max_tiles_kwargs(99) == {"do_image_splitting": False}


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="a height"):
        info_of(Idefics3ProcessingInfo, {"size": {"longest_edge": 0}})


def test_numbers_in_words():
    words = {
        0: "zero",
        13: "thirteen",
        20: "twenty",
        64: "sixty-four",
        105: "one hundred and five",
        768: "seven hundred and sixty-eight",
    }
    words |= {1000: "one thousand", 1200: "one thousand, two hundred", 2007: "two thousand and seven"}
    assert {number: number_words(number) for number in words} == words


@pytest.mark.parametrize("library", ["pillow", "torch"])
def test_the_option_resample_is_a_library_and_the_jsons_a_filter(library):
    info = info_of(Idefics3ProcessingInfo, {"resample": 3}, {"resample": library})
    assert (info.specs["image"].filter, info.specs["image"].resample) == ("bicubic", library)
