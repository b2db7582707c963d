"""MiniCPM-V's processors: numbers of images, placeholders in chats, frames of videos, options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision, small_tokenizer
from PIL import Image, ImageDraw, ImageFont
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.geometry import sample_indices
from sensorium.mm.types import FramePlan, ImageItem, MediaHeader
from sensorium.models.families.minicpmv.processing import (
    MiniCPMOcrProcessingInfo,
    MiniCPMV46ProcessingInfo,
    MiniCPMV47ProcessingInfo,
    MiniCPMVProcessingInfo,
)
from sensorium.processors.files import ProcessorFiles

TAGS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>", "<|image_pad|>", "<|video_pad|>"]
WORDS = small_tokenizer(TAGS)


def encode(text: str) -> list[int]:
    return list(WORDS.encode(text, add_special_tokens=False).ids)


def files_of(image: dict[str, Any], **config: Any) -> ProcessorFiles:
    return ProcessorFiles(
        {"vocab_size": WORDS.get_vocab_size(), **config},
        image,
        encode=encode,
        token_to_id=WORDS.token_to_id,
        decode=lambda ids: str(WORDS.decode(list(ids), skip_special_tokens=True)),
    )


def published(version: float = 2.6, *options: dict[str, Any], **image: Any) -> MiniCPMVProcessingInfo:
    return MiniCPMVProcessingInfo(files_of({"use_image_id": True, **image}, version=version), *options)


def text_of(info: MiniCPMVProcessingInfo, ids: Any) -> str:
    ids = [WORDS.token_to_id("<|video_pad|>") if token == info.placeholder_ids["video"] else token for token in ids]
    return str(WORDS.decode(ids, skip_special_tokens=False))


def test_prompts_may_be_written_or_rendered():
    """In a chat the placeholders are tokens already; what a user wrote stays text."""
    info = published()
    written = encode("a (<image>./</image>) b (<video>./</video>) c(<image>./</image>)")
    placed = info.preprocess_prompt(written, {"image": 2, "video": 1})
    assert text_of(info, placed) == "a <image_id>0</image_id><unk> b <|video_pad|> c<image_id>1</image_id><unk>"
    chat = [*encode("(<image>./</image>)"), *encode("d"), info.placeholder_ids["image"]]
    assert text_of(info, info.preprocess_chat(chat, {"image": 1})) == "(<image>./</image>)d<image_id>0</image_id><unk>"
    assert list(info.preprocess_prompt(written, {})) == written


def test_sizes_of_small_images_of_minicpm_ocr():
    small, large = MediaHeader("image", 100, 130), MediaHeader("image", 800, 900)
    kept, enlarged = (MiniCPMOcrProcessingInfo(files_of({"small_image_upsize": one})) for one in ("never", "always"))
    assert [one.specs["image"].merge for one in (kept, MiniCPMV46ProcessingInfo(files_of({})))] == [2, 4]
    assert kept.geometry(small).num_embeds == 4 * 5
    assert enlarged.geometry(small).num_embeds > 200
    assert kept.geometry(large) == enlarged.geometry(large)
    assert kept.specs["video"] == enlarged.specs["video"]
    with pytest.raises(ConfigError):
        MiniCPMOcrProcessingInfo(files_of({"small_image_upsize": "sometimes"}))


def page(height: int, width: int, letters: Sequence[tuple[int, int]], size: int, light: bool = False) -> Image.Image:
    """Draw words of letters of `size` pixels at (row, column) places, dark on light or light on dark."""
    canvas = Image.new("RGB", (width, height), (20, 24, 40) if light else (250, 248, 240))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size)
    for row, column in letters:
        draw.text((column, row), "the quick brown fox jumps", (240, 240, 230) if light else (10, 10, 10), font)
    return canvas


LINES = [(row, 4) for row in range(4, 92, 12)]
PAGES = {
    "small letters": page(96, 160, LINES, 9),
    "light letters on a dark ground": page(96, 160, LINES, 9, light=True),
    "large letters": page(96, 260, [(20, 4)], 40),
    "blank": page(120, 130, [], 9),
    "tiny": page(40, 60, [], 9),
    "tiny with letters": page(50, 90, [(2, 2), (14, 2), (26, 2)], 9),
    "slices with and without letters": page(400, 380, [(row, 4) for row in range(4, 180, 12)], 9),
    "one slice with letters": page(300, 900, [(row, 4) for row in range(4, 140, 12)], 9),
    "large, letters everywhere": page(700, 800, [(row, x) for row in range(4, 690, 12) for x in range(0, 800, 130)], 9),
    "a line": page(12, 700, [(0, 2)], 9),
}


@pytest.mark.parametrize("scale", [112, 448])
@pytest.mark.parametrize("name", PAGES)
def test_sizes_follow_letters(name: str, scale: int) -> None:
    """Sizes and pixels are those of transformers, and the rows before an image is decoded are an upper bound."""
    ensure_torchvision()
    import transformers as tf

    image = PAGES[name]
    settings = {"small_image_upsize": "adaptive", "scale_resolution": scale, "max_slice_nums": 9}
    theirs = tf.MiniCPMOcrImageProcessor(**settings)(images=[image], return_tensors="pt")
    first = MiniCPMOcrProcessingInfo(files_of(settings))
    item = ImageItem(torch.from_numpy(np.array(image)))
    info = first.for_item(item)
    assert (first.is_exact(item.header), info.is_exact(item.header)) == (False, True)
    tensors, grid = info.process(item, torch.float32)
    sizes = tensors["grids"].data[:, 1:]
    assert sizes.tolist() == theirs["target_sizes"].tolist()
    strips = []
    for mine, (h, w) in zip(tensors["pixel_values"].data.split(sizes.prod(1).tolist()), sizes.tolist(), strict=True):
        rows = mine.view(h // 2, w // 2, 2, 2, -1).transpose(1, 2).reshape(h * w, 3, 14, 14)
        strips.append(rows.permute(1, 2, 0, 3).flatten(2))
    assert (torch.cat(strips, -1)[None] - theirs["pixel_values"]).abs().max() < 1e-5
    each = (sizes.prod(1) // 4).tolist()
    assert grid.num_embeds == sum(each) <= first.geometry(item.header).num_embeds
    span = info.span("image", grid)
    assert [run.repeat for run in span.runs() if run.is_embed] == each
    lines = theirs["grids"][0][0]
    assert span.num_tokens == sum(each) + 2 * len(each) + max(0, lines - 1) * len(encode("\n"))


def test_letters_decide_between_sizes() -> None:
    """The pages above cover every size: enlarged, kept, of a tiny image, and slices of both kinds."""
    info = MiniCPMOcrProcessingInfo(files_of({"small_image_upsize": "adaptive"}))
    rows = {}
    for name, image in PAGES.items():
        item = ImageItem(torch.from_numpy(np.array(image)))
        rows[name] = info.for_item(item).process(item, torch.float32)[0]["grids"].data.prod(1).tolist()
    assert rows["small letters"] == rows["light letters on a dark ground"]
    assert rows["tiny"] == [4 * 8]
    assert len({*rows["one slice with letters"][1:]}) > 1
    assert len({*rows["large, letters everywhere"][1:]}) == 1


def test_the_canvas_of_minicpmv_4_7():
    info = MiniCPMV47ProcessingInfo(files_of({}))
    grid = info.geometry(MediaHeader("image", 800, 900))
    assert grid.tiles == (2, 2)
    assert grid.positions is not None
    (tall, wide), (high, broad) = grid.positions.params
    assert (tall * wide, high * broad) == (grid.extra, grid.w)
    newline = encode("\n")
    assert info.span("image", grid).trailing == frozenset(newline)
    prompt = [info.placeholder_ids["image"], *newline, info.placeholder_ids["video"]]
    assert info.preprocess_prompt(prompt, {"image": 1, "video": 1}) == [*encode("<image_id>0</image_id>"), *prompt]
    assert not info.parser().embeddings


def test_expanded_images_get_no_numbers():
    info = MiniCPMV46ProcessingInfo(files_of({}))
    expanded = encode("<image_id>0</image_id><image><|image_pad|><|image_pad|></image><slice><|image_pad|></slice> and ")
    ids = info.preprocess_prompt([*expanded, info.placeholder_ids["image"]], {"image": 2})
    assert list(ids) == [*expanded, *encode("<image_id>0</image_id><|image_pad|>")]
    bare = MiniCPMV46ProcessingInfo(files_of({}), {"use_image_id": False})
    assert list(bare.preprocess_prompt(expanded, {"image": 1})) == expanded


@pytest.mark.parametrize(("total", "fps"), [(315, 30.0), (12, 24.0), (29, 29.97), (4000, 25.0), (1300, 10.0), (7, 2.0)])
def test_frames_are_the_published_ones(total, fps):
    ensure_torchvision()
    from transformers import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    info = MiniCPMV46ProcessingInfo(files_of({}))
    assert sample_indices(total, fps, info.decode_spec.sampling) == MiniCPMV4_6VideoProcessor().sample_frames(metadata)


def test_frames_of_long_videos_are_packed():
    def frames(count: int) -> MediaHeader:
        return MediaHeader("video", 448, 448, FramePlan(tuple(range(count)), tuple(i / 3 for i in range(count)), count, 3.0))

    assert [published(4.5).geometry(frames(n)).t for n in (180, 181, 540, 541)] == [180, 91, 180, 181]
    assert published(2.6).geometry(frames(181)).t == 181
    packed = {pack: published(4.5, {"force_packing": pack} if pack else {}) for pack in (None, 1, 3)}
    assert packed[3].geometry(frames(7)).t == 3
    assert len({info.options_key("video") for info in packed.values()}) == 3
    with pytest.raises(ConfigError, match=r"MiniCPM-V 4\.5 only"):
        published(2.6, {"force_packing": 3})


def test_thin_images_are_refused():
    with pytest.raises(InputError, match="crop it first"):
        published().geometry(MediaHeader("image", 1, 5000))
