"""Gemma 3's processor beyond the parity suite: pan and scan, options, precomputed embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import small_tokenizer
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.types import EmbeddingItem, ItemGeometry, MediaHeader
from sensorium.models.families.gemma3.processing import Gemma3ProcessingInfo
from sensorium.processors.files import ProcessorFiles

WORDS = small_tokenizer(["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
START, END, SOFT = (WORDS.token_to_id(name) for name in ("<start_of_image>", "<end_of_image>", "<image_soft_token>"))
SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
LONG = MediaHeader("image", 40, 150)


def info_of(*options: dict[str, Any], **config: Any) -> Gemma3ProcessingInfo:
    config = {
        "boi_token_index": START, "eoi_token_index": END, "image_token_index": SOFT, "mm_tokens_per_image": 9,
        "vision_config": {"image_size": 84, "patch_size": 14}, "text_config": {"vocab_size": 640, "hidden_size": 64},
    } | config  # fmt: skip
    image = {"size": {"height": 84, "width": 84}, "do_pan_and_scan": None, "pan_and_scan_max_num_crops": None}
    encode = lambda text: WORDS.encode(text, add_special_tokens=False).ids  # noqa: E731
    return Gemma3ProcessingInfo(ProcessorFiles(config, image, encode=encode), *options)


def text_of(info: Gemma3ProcessingInfo, grid: ItemGeometry) -> str:
    span = info.span("image", grid)
    return WORDS.decode([*span.before, *span.token_ids, *span.after], skip_special_tokens=False)


def test_a_long_image_is_cut_only_with_pan_and_scan() -> None:
    square = "<start_of_image>" + "<image_soft_token>" * 9 + "<end_of_image>"
    assert text_of(info_of(), info_of().geometry(LONG)) == f"\n\n{square}\n\n"
    cut = info_of(SCAN)
    grid = cut.geometry(LONG)
    assert (grid.t, grid.tiles) == (5, (1, 4))
    crops = "\n\n \n\n".join([square] * 4)
    words = "and here are some crops to help you see better"
    assert text_of(cut, grid) == f"Here is the original image \n\n{square}\n\n {words} \n\n{crops}\n\n"


def test_shrinking_drops_the_crops() -> None:
    cut = info_of(SCAN)
    assert cut.with_kwargs({"detail": "low"}).geometry(LONG).t == 1
    assert cut.with_kwargs(cut.shrink_kwargs("image", (5, 6, 6), 20) or {}).geometry(LONG).t == 1


def test_precomputed_embeddings_are_whole_squares() -> None:
    info = info_of()
    grid = info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(27, 64)}))
    assert (grid.t, grid.num_embeds) == (3, 27)
    assert text_of(info, grid).startswith("Here is")
    with pytest.raises(InputError, match="multiple of the 9 rows"):
        info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(10, 64)}))


@pytest.mark.parametrize(
    "options",
    [
        {**SCAN, "pan_and_scan_min_ratio_to_activate": "wide"},
        {**SCAN, "pan_and_scan_max_num_crops": 0},
        {**SCAN, "detail": "some"},
        {"pan_and_scan": True},
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        info_of(options)


@pytest.mark.parametrize(("tokens", "side", "rows"), [(10, 84, 9), (16, 84, 36), (9, 98, 9), (4, 98, 4)])
def test_rows_of_images_whose_squares_leave_patches_out(tokens: int, side: int, rows: int) -> None:
    """Squares have as many patches per side as the root of the number goes into the image's, both rounded down."""
    sizes = {"vision_config": {"image_size": side, "patch_size": 14}, "mm_tokens_per_image": tokens}
    image = {"size": {"height": side, "width": side}}
    config = info_of().files.config | sizes
    info = Gemma3ProcessingInfo(ProcessorFiles(config, image, encode=info_of().files.encode))
    assert info.geometry(MediaHeader("image", 60, 60)).num_embeds == rows


def test_more_rows_than_patches_are_refused() -> None:
    with pytest.raises(ConfigError):
        info_of(mm_tokens_per_image=49)
