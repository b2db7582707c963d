"""DeepSeek-OCR 2's processor against transformers' own at published sizes: tiles, options, what shrinks and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer
from PIL import Image
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import ImageItem, MediaHeader
from sensorium.models.families.deepseek_ocr2.processing import DeepseekOcr2ProcessingInfo, DeepseekOcrProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tokenizer import Tokenizer

SIDES = (1, 2, 97, 600, 767, 768, 769, 1024, 1500, 1999)
SMALL = {"size": {"height": 64, "width": 64}, "tile_size": 48}


def published(**json: Any) -> Any:
    ensure_torchvision()
    from transformers import DeepseekOcr2ImageProcessor

    return DeepseekOcr2ImageProcessor(**json)


def info_of(
    json: dict[str, Any] | None = None, *options: dict[str, Any], patch: int = 16, kind: Any = DeepseekOcr2ProcessingInfo
) -> DeepseekOcr2ProcessingInfo:
    config = {
        "image_token_id": 5,
        "text_config": {"vocab_size": 10, "hidden_size": 64},
        "vision_config": {"sam_config": {"patch_size": patch}},
    }
    return kind(ProcessorFiles(config, image=json or {}), *options)


@pytest.mark.parametrize("options", [{}, {"max_patches": 9}, {"min_patches": 1, "max_patches": 3}, {"crop_to_patches": False}])
def test_tiles_are_the_published_ones(options: dict[str, Any]) -> None:
    theirs, info = published(), info_of({}, options)
    for tall in SIDES:
        for wide in SIDES:
            if max(tall, wide) >= 2 * 768 * min(tall, wide):
                continue
            grid = info.geometry(MediaHeader("image", tall, wide))
            pieces = theirs.get_number_of_image_patches(tall, wide, options)
            whole = 256 if options.get("crop_to_patches", True) else 144
            assert grid.num_embeds == whole + 144 * (pieces - 1) + 1 == info.span("image", grid).num_tokens, (tall, wide)


@pytest.mark.parametrize("json", [{}, {"background_color": [3, 200, 90], "image_mean": [0.1, 0.2, 0.3]}, {"resample": 2}])
@pytest.mark.parametrize("size", [(31, 40), (48, 48), (49, 20), (90, 50), (33, 200)])
def test_pixels_are_the_published_ones(json: dict[str, Any], size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    made, _ = info_of({**SMALL, **json}, patch=1).process(ImageItem(torch.from_numpy(pixels)), torch.float32)
    theirs = published(**SMALL, **json)(Image.fromarray(pixels), return_tensors="pt")
    for name in ("pixel_values", "pixel_values_local"):
        planes = theirs.get(name, torch.empty(0, 3, 48, 48))
        assert torch.equal(made[name].data, planes.permute(0, 2, 3, 1).flatten(0, 2)), name


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ((640, 640), 16 * 17 + 1),
        ((640, 641), 16 * 17 + 1 + 20 * 21),  # 2 x 2 tiles
        ((300, 1200), 16 * 17 + 1 + 10 * 41),  # 1 x 4
        ((2000, 600), 16 * 17 + 1 + 30 * 11),  # 3 x 1
        ((3000, 2000), 16 * 17 + 1 + 30 * 21),
    ],
)
def test_deepseek_ocr_ends_each_line_with_a_row(size: tuple[int, int], rows: int) -> None:
    """Lines run over all tiles side by side, 10 rows of each; the whole has 16 lines; one row separates both."""
    assert info_of(kind=DeepseekOcrProcessingInfo).geometry(MediaHeader("image", *size)).num_embeds == rows


@pytest.mark.parametrize("kind", [DeepseekOcr2ProcessingInfo, DeepseekOcrProcessingInfo])
def test_shrink_kwargs_shrink_enough(kind: Any) -> None:
    header = MediaHeader("image", 3000, 2000)
    info = info_of(kind=kind)
    grid = info.geometry(header)
    for rows in (grid.num_embeds - 1, 700, 401, 400, 300, 256, 145):
        options = info.shrink_kwargs("image", (grid.t, grid.h, grid.w), rows)
        assert options is not None
        assert info.with_kwargs(options).geometry(header).num_embeds <= rows
    assert info.shrink_kwargs("image", (grid.t, grid.h, grid.w), 110) is None
    assert info.shrink_kwargs("image", (1, info.with_kwargs({"detail": "low"}).geometry(header).h, 0), 145) is None


def test_detail_low_is_the_whole_at_a_tiles_size() -> None:
    grid = info_of({}, {"detail": "low"}).geometry(MediaHeader("image", 3000, 2000))
    assert (grid.num_embeds, grid.tiles) == (145, (0, 0))


@pytest.mark.parametrize("json", [{"size": {"height": 1280, "width": 1280}}, {"tile_size": 640}, {"size": [1024, 768]}])
def test_sizes_without_queries_are_refused(json: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="this model takes"):
        info_of(json)


def test_a_sliver_is_refused() -> None:
    with pytest.raises(InputError, match="5000x2"):
        info_of().geometry(MediaHeader("image", 2, 5000))


@pytest.mark.parametrize("grounding", [False, True])
def test_only_the_template_writes_the_grounding_token(tmp_path: Path, grounding: bool) -> None:
    fast_tokenizer(["<image>", "<|grounding|>", "<bos>"], bos_token="<bos>").save_pretrained(tmp_path)
    tok, text = Tokenizer(tmp_path), "<|grounding|>Convert the document to markdown. "
    parts = [{"type": "text", "text": text}, {"type": "image", "image": b"page"}]
    chat = render_chat([{"role": "user", "content": parts}], DeepseekOcr2ProcessingInfo.chat_template, tok, grounding=grounding)
    start = "<bos><image>\n" + "<|grounding|>" * grounding
    assert chat.text == start + text
    assert tok.encode_pieces(chat.segments) == tok.encode(start, add_special_tokens=False) + tok.encode_ordinary(text)
