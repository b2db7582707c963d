"""Pixtral's and Mistral 3's processors against transformers' own and mistral-common: pixels, tokens with their breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import fast_tokenizer, small_tokenizer
from PIL import Image
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import ImageItem, ItemGeometry, MediaHeader
from sensorium.models.families.lighton_ocr.processing import LightOnOcrProcessingInfo
from sensorium.models.families.pixtral.processing import (
    Mistral3ProcessingInfo,
    MistralFormatProcessingInfo,
    PixtralProcessingInfo,
)
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out

SIDES = (1, 30, 57, 112, 333, 640, 1999)
SPECIALS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>"]


def published(merge: int, edge: int = 112) -> Any:
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    words = fast_tokenizer(SPECIALS, eos_token="</s>", pad_token="</s>")
    images = PixtralImageProcessor(size={"longest_edge": edge}, patch_size={"height": 14, "width": 14})
    return PixtralProcessor(images, words, patch_size=14, spatial_merge_size=merge, chat_template="")


def info_of(cls: type = PixtralProcessingInfo, edge: int = 112, *options: dict, **changes: Any) -> PixtralProcessingInfo:
    tok = small_tokenizer(SPECIALS)
    config = {
        "image_token_index": tok.token_to_id("[IMG]"),
        "vision_config": {"patch_size": 14},
        "text_config": {"hidden_size": 64, "vocab_size": tok.get_vocab_size()},
    }
    return cls(ProcessorFiles(config | changes, {"size": {"longest_edge": edge}}, token_to_id=tok.token_to_id), *options)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def plane(kwargs: Any, merge: int) -> torch.Tensor:
    """Return patches as an image `[3, h, w]`."""
    _, h, w = kwargs["grid"].data.tolist()
    patches = kwargs["pixel_values"].data.view(h // merge, w // merge, merge, merge, 3, 14, 14)
    return patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h * 14, w * 14)


@pytest.mark.parametrize(("cls", "merge"), [(PixtralProcessingInfo, 1), (Mistral3ProcessingInfo, 2)])
def test_pixels_and_tokens_equal(cls, merge):
    oracle, info = published(merge), info_of(cls)
    for seed, size in enumerate((tall, wide) for tall in SIDES for wide in SIDES):
        if max(size) > 112 * min(size):  # the published processor makes an image of zero height here
            continue
        item = ImageItem(noise(*size, 3, seed=seed))
        want = oracle(images=[Image.fromarray(item.pixels.numpy())], text="[IMG]", return_tensors="pt")
        kwargs, grid = info.process(item, torch.float32)
        torch.testing.assert_close(plane(kwargs, merge), want["pixel_values"][0], atol=2e-6, rtol=0)
        span = info.span("image", grid)
        assert list(span.token_ids) == want["input_ids"][0].tolist(), size
        assert torch.equal(span.is_embed, want["input_ids"][0] == info.placeholder_ids["image"])
        assert int(span.is_embed.sum()) == grid.num_embeds


def test_tokens_of_a_known_size():
    info = PixtralProcessingInfo(
        ProcessorFiles({"vision_config": {}}, {}, token_to_id={"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}.get)
    )
    span = info.span("image", info.geometry(MediaHeader("image", 512, 512)))
    assert (len(span.token_ids), int(span.is_embed.sum())) == (1056, 1024)
    assert info.geometry(MediaHeader("image", 3000, 1000)).merged == (1, 64, 22)


@pytest.mark.parametrize(("merge", "edge"), [(1, 112), (2, 112), (2, 1540)])
def test_tokens_equal_mistral_common(merge, edge):
    from mistral_common.protocol.instruct.chunk import ImageChunk
    from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder, SpecialImageIDs

    info = info_of(MistralFormatProcessingInfo, edge, spatial_merge_size=merge)
    ids = SpecialImageIDs(
        info.placeholder_ids["image"], info.special_token_id("[IMG_BREAK]"), info.special_token_id("[IMG_END]")
    )
    oracle = ImageEncoder(ImageConfig(14, edge, merge), ids)
    for size in ((tall, wide) for tall in SIDES for wide in SIDES):
        want = oracle(ImageChunk(image=Image.new("RGB", size[::-1])))
        grid = info.geometry(MediaHeader("image", *size))
        assert list(info.span("image", grid).token_ids) == want.tokens, size
        assert (grid.h * 14, grid.w * 14) == want.image.shape[1:], size


def test_a_whole_prompt():
    oracle, info = published(2), info_of(Mistral3ProcessingInfo)
    items = [ImageItem(noise(60, 130, 3)), ImageItem(noise(40, 40, 3, seed=1))]
    text = "[IMG]and[IMG]\nWhat?</s>"
    want = oracle(images=[item.pixels.numpy() for item in items], text=text, return_tensors="pt")
    placeholders = small_tokenizer(SPECIALS).encode(text, add_special_tokens=False).ids
    spans = [[info.span("image", info.geometry(item.header))] for item in items]
    ids, ranges = lay_out(placeholders, {"image": spans}, info.placeholder_ids).expand()
    assert list(ids) == want["input_ids"][0].tolist()
    again, same = lay_out(ids, {"image": spans}, info.placeholder_ids).expand()  # already expanded
    assert again == ids
    for (first,), (second,) in zip(ranges["image"], same["image"], strict=True):
        assert (first.offset, first.length) == (second.offset, second.length)
        assert torch.equal(first.mask(), second.mask())


def test_options_make_it_smaller():
    info, header = info_of(Mistral3ProcessingInfo, 1540), MediaHeader("image", 700, 1100)
    assert info.geometry(header) == ItemGeometry(1, 50, 80, 2)
    assert info.with_kwargs({"detail": "low"}).geometry(header).w == 38
    assert info.with_kwargs({"size": {"longest_edge": 280}}).geometry(header).w == 20
    assert info.with_kwargs({"max_pixels": 280 * 280}).geometry(header).w == 20
    for size in ((700, 1100), (29, 900), (1000, 57), (701, 673)):
        grid = info.geometry(MediaHeader("image", *size))
        for rows in range(1, grid.num_embeds, 7):
            options = info.shrink_kwargs("image", (1, grid.h, grid.w), rows)
            assert info.with_kwargs(options).geometry(MediaHeader("image", *size)).num_embeds <= rows
    assert info.shrink_kwargs("image", (1, 2, 2), 1) is None


def test_invalid_settings_are_refused():
    for options, said in (({"max_pixels": 0}, "positive"), ({"size": {"edge": 9}}, "a height"), ({"detail": 3}, "low")):
        with pytest.raises(ConfigError, match=said):
            info_of(PixtralProcessingInfo, 112, options)
    with pytest.raises(ConfigError, match="lacks the token"):
        PixtralProcessingInfo(ProcessorFiles({"vision_config": {}}, token_to_id=lambda text: None))


def test_images_that_keep_their_size() -> None:
    kept = {"size": {"longest_edge": 112}, "do_resize": False}
    files = ProcessorFiles({"vision_config": {"patch_size": 14}, "image_token_index": 3}, kept, token_to_id=lambda text: 4)
    info = PixtralProcessingInfo(files)
    assert info.geometry(MediaHeader("image", 60, 100)) == ItemGeometry(1, 4, 7, 1)
    assert info.shrink_kwargs("image", (1, 4, 7), 12) is None
    for size in ((13, 100), (60, 113)):
        with pytest.raises(InputError, match="at least 14") as caught:
            info.geometry(MediaHeader("image", *size))
        assert caught.value.info.code == "unsupported"
    with pytest.raises(InputError, match="a multiple of 2 patches") as caught:
        Mistral3ProcessingInfo(files).geometry(MediaHeader("image", 70, 60))
    assert caught.value.info.code == "unsupported"
    assert LightOnOcrProcessingInfo(files).geometry(MediaHeader("image", 56, 84)) == ItemGeometry(1, 4, 6, 2)
