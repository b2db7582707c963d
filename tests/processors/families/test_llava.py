"""LLaVA's processors at their published sizes against transformers' counts, their options and what they refuse."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer
from PIL import Image
from sensorium.callers.errors import ConfigError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.types import FramePlan, ItemGeometry, MediaHeader, VideoItem
from sensorium.models.families.granite4_vision.processing import Granite4VisionProcessingInfo
from sensorium.models.families.llava.processing import (
    LlavaNextProcessingInfo,
    LlavaOnevisionProcessingInfo,
    LlavaProcessingInfo,
    MiniMaxVLProcessingInfo,
)
from sensorium.processors.files import ProcessorFiles, find_template
from sensorium.processors.text.tokenizer import Tokenizer

SIDES = (1, 30, 57, 336, 500, 777, 1200, 3000)
SIZES = [(tall, wide) for tall in SIDES for wide in SIDES]
SQUARE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
LARGE = {"size": {"height": 384, "width": 384}}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}


def files(image: dict[str, Any], **config: Any) -> ProcessorFiles:
    return ProcessorFiles({"text_config": {"hidden_size": 64, "vocab_size": 151700}} | config, image)


def published(name: str) -> Any:
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(("<|endoftext|>", "<image>", "<video>"), eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    if name == "next":
        images = tf.LlavaNextImageProcessor(**SQUARE)
        more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return tf.LlavaNextProcessor(images, tokenizer=words, **more)
    if name == "granite":
        images = tf.LlavaNextImageProcessor(**LARGE, crop_size=LARGE["size"])
        more = {"patch_size": 16, "vision_feature_select_strategy": "full", "downsample_rate": "4/8"}
        return tf.Granite4VisionProcessor(images, tokenizer=words, **more)
    parts = {"image_processor": tf.LlavaOnevisionImageProcessor(), "video_processor": tf.LlavaOnevisionVideoProcessor()}
    return tf.LlavaOnevisionProcessor(**parts, tokenizer=words, num_image_tokens=729, vision_feature_select_strategy="full")


def counts(info: Any) -> list[int]:
    return [info.geometry(MediaHeader("image", *size)).num_embeds for size in SIZES]


def test_tiles_of_minimax_vl() -> None:
    """The rules of the publisher's processor, in whole numbers: sides inside the tiles and unpadded sides are rounded down."""
    info = MiniMaxVLProcessingInfo(files(SQUARE, image_token_index=151650))
    for tall, wide in SIZES:
        header = MediaHeader("image", tall, wide)
        _, (resize, window) = (view.steps for view in info.plan(header).views)
        rows, columns = window.height // 336, window.width // 336
        inside, kept = [window.height, window.width], [24 * rows, 24 * columns]
        side = 0 if wide * rows > tall * columns else 1
        ratio = Fraction(tall, wide) if side == 0 else Fraction(wide, tall)
        inside[side] = max(1, math.floor(inside[1 - side] * ratio))
        kept[side] -= (kept[side] - math.floor(kept[1 - side] * ratio)) // 2 * 2
        assert [resize.height, resize.width] == inside, (tall, wide)
        assert info.geometry(header).num_embeds == 24 * 24 + kept[0] * (kept[1] + 1), (tall, wide)


def test_counts_are_the_published_ones() -> None:
    """The settings are those of the published checkpoints; `image_grid_pinpoints` is left out of the JSON."""
    wanted = published("next")._get_num_multimodal_tokens(image_sizes=SIZES)["num_image_tokens"]
    assert counts(LlavaNextProcessingInfo(files(SQUARE))) == wanted
    wanted = published("onevision")._get_num_multimodal_tokens(image_sizes=SIZES)["num_image_tokens"]
    assert counts(LlavaOnevisionProcessingInfo(files(LARGE))) == wanted


def test_fewer_rows_than_patches() -> None:
    """An encoder row is six times as wide as the decoder: its input and five DeepStack levels."""
    oracle = published("granite")
    sizes = oracle.image_processor.image_grid_pinpoints = [[384, 768], [768, 384], [768, 768]]
    config = {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0], [3, 9]], "image_grid_pinpoints": sizes}
    chosen = {"vision_feature_select_strategy": "full", "vision_config": SIGLIP | {"patch_size": 16}}
    info = Granite4VisionProcessingInfo(files(LARGE, **config, **chosen))
    assert counts(info) == oracle._get_num_multimodal_tokens(image_sizes=SIZES)["num_image_tokens"]
    assert info.embed_width == 64 * 6
    with pytest.raises(ConfigError, match="downsample_rate"):
        Granite4VisionProcessingInfo(files(LARGE, **config | {"downsample_rate": "8/4"}, **chosen))


def test_one_square_and_its_class_token() -> None:
    header = MediaHeader("image", 90, 1000)
    assert LlavaProcessingInfo(files(SQUARE)).geometry(header) == ItemGeometry(1, 24, 24)
    kept = LlavaProcessingInfo(files(SQUARE, vision_feature_select_strategy="full"))
    assert kept.geometry(header).num_embeds == 577


def test_low_detail_is_the_whole_image_alone() -> None:
    info, header = LlavaNextProcessingInfo(files(SQUARE)), MediaHeader("image", 600, 600)
    assert info.geometry(header).t == 5
    low = info.with_kwargs({"detail": "low"})
    assert low.geometry(header) == ItemGeometry(1, 24, 24, extra=1)
    assert info.shrink_kwargs("image", (5, 24, 24), 700) == {"detail": "low"}
    assert info.shrink_kwargs("image", (1, 24, 24), 100) is None
    assert low.options_key("image") != info.options_key("image")


def test_frames_are_pooled() -> None:
    info = LlavaOnevisionProcessingInfo(files(LARGE))
    plan = FramePlan((0, 3, 9), (0.0, 1.0, 3.0), 12, 1.0)
    item = VideoItem(torch.zeros(3, 40, 50, 3, dtype=torch.uint8), plan)
    kwargs, grid = info.process(item, torch.float32)
    assert grid.num_embeds == 3 * 14 * 14 + 1
    assert kwargs["pixel_values"].data.shape == (3 * 27 * 27, 3 * 14 * 14)
    assert set(kwargs) == {"pixel_values", "grid"}
    assert info.decode_spec.sampling == FrameSampling(spread="ends", max_frames=32)
    assert info.with_kwargs({"num_frames": 4}).decode_spec.sampling.num_frames == 4
    assert info.shrink_kwargs("video", (3, 27, 27), 2 * 196 + 1) == {"num_frames": 2}
    assert info.shrink_kwargs("video", (3, 27, 27), 196) is None


@pytest.mark.parametrize(
    ("cls", "image", "config", "text"),
    [
        (LlavaProcessingInfo, SQUARE, {"vision_config": {"image_size": 224}}, "image_size in vision_config is 224"),
        (LlavaNextProcessingInfo, SQUARE | {"size": {"shortest_edge": 448}}, {}, "differ"),
        (LlavaNextProcessingInfo, SQUARE | {"image_grid_pinpoints": [[300, 300]]}, {}, "whole number of tiles"),
        (LlavaOnevisionProcessingInfo, LARGE, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio"),
        (LlavaNextProcessingInfo, SQUARE, {"vision_feature_select_strategy": "full"}, "another number of rows than of patches"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(
    cls: Any, image: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        cls(files(image, **config))


@pytest.mark.shared
@pytest.mark.parametrize("messages", [1, 3])
def test_chat_adds_what_the_published_processor_adds(shared_data: Path, messages: int) -> None:
    """LLaVA-1.5's template writes no BOS; its tokenizer adds it."""
    ensure_torchvision()
    import transformers as tf

    folder = shared_data / "published" / "llava" / "llava-1.5-7b-hf"

    def talk(text: str) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": Image.new("RGB", (400, 300))}, {"type": "text", "text": text}]
        return [{"role": ("user", "assistant")[turn % 2], "content": parts[turn > 0 :]} for turn in range(messages)]

    words = tf.AutoTokenizer.from_pretrained(folder)
    images = tf.CLIPImageProcessor(**SQUARE)
    more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    oracle = tf.LlavaProcessor(images, tokenizer=words, chat_template=find_template(folder), **more)
    info = LlavaProcessingInfo(files(SQUARE, image_token_index=32000))
    inputs = InputProcessor(info, Tokenizer(folder), MultiModalSettings(), 4096)
    made = [list(inputs.parse_chat(talk(text), {"template": find_template(folder)}, {}).finish().token_ids)
            for text in ("What is it?", "What is <s> here?")]  # fmt: skip
    want = oracle.apply_chat_template(talk("What is it?"), add_generation_prompt=True, tokenize=True, return_dict=True)
    assert made[0] == list(want["input_ids"][0])
    assert made[1].count(1) == 1  # a user's "<s>" neither is BOS nor stands for it
    assert made[1][0] == 1


def test_several_images_are_not_tiled_unless_the_caller_says_so() -> None:
    """729 rows and a newline row each, which the parity suite compares with transformers."""
    info, header = LlavaOnevisionProcessingInfo(files(LARGE)), MediaHeader("image", 900, 500)
    tiled = info.geometry(header).num_embeds
    assert info.prompt_kwargs({"image": 1, "video": 2}) == {}
    assert info.with_kwargs(info.prompt_kwargs({"image": 2})).geometry(header).num_embeds == 730 < tiled
    for chosen in ({"image_aspect_ratio": "anyres"}, {"images_kwargs": {"detail": "high"}}):
        assert info.with_kwargs(chosen).prompt_kwargs({"image": 2}) == {}
    own = info.with_kwargs({**info.prompt_kwargs({"image": 2}), "image_aspect_ratio": "anyres"})
    assert own.geometry(header).num_embeds == tiled
    with pytest.raises(ConfigError, match="image_aspect_ratio is 'square'"):
        info.with_kwargs({"image_aspect_ratio": "square"})
