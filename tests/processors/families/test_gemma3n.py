"""Gemma 3n's processor beyond the parity suite: sizes that contradict each other, precomputed embeddings of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import small_tokenizer
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.tiling.whole import FixedSize
from sensorium.mm.types import EmbeddingItem, MediaHeader
from sensorium.models.families.gemma3n.processing import Gemma3nProcessingInfo
from sensorium.processors.files import ProcessorFiles

WORDS = small_tokenizer(["<boi>", "<image>", "<eoi>", "<boa>", "<audio>", "<eoa>"])
IDS = {name: WORDS.token_to_id(f"<{name}>") for name in ("boi", "image", "eoi", "boa", "audio", "eoa")}


def info_of(size: int = 96, **config: Any) -> Gemma3nProcessingInfo:
    config = {
        **{f"{name}_token_id": number for name, number in IDS.items()}, "vision_soft_tokens_per_image": 9,
        "vision_config": {"pretrained_cfg": {"input_size": [3, 96, 96]}}, "text_config": {"vocab_size": 640, "hidden_size": 64},
    } | config  # fmt: skip
    image = {"size": {"height": size, "width": size}, "do_normalize": False, "resample": 2}
    encode = lambda text: WORDS.encode(text, add_special_tokens=False).ids  # noqa: E731
    return Gemma3nProcessingInfo(ProcessorFiles(config, image, encode=encode))


def test_an_image_has_its_rows_between_tokens_and_empty_lines() -> None:
    info = info_of()
    span = info.span("image", info.geometry(MediaHeader("image", 40, 150)))
    text = WORDS.decode([*span.before, *span.token_ids, *span.after], skip_special_tokens=False)
    assert text == "\n\n<boi>" + "<image>" * 9 + "<eoi>\n\n"


def test_precomputed_embeddings_are_one_image() -> None:
    info = info_of()
    assert info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(9, 64)})).num_embeds == 9
    with pytest.raises(InputError, match="holds 10 rows, an image of this model has 9"):
        info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(10, 64)}))
    assert info.embeds_geometry(EmbeddingItem("audio", {ROWS: torch.zeros(10, 64)})).num_embeds == 10


def test_without_a_preprocessors_file_images_are_processed_as_published() -> None:
    spec = Gemma3nProcessingInfo(ProcessorFiles()).specs["image"]
    assert (spec.tiling, spec.filter, spec.mean, spec.patch) == (FixedSize((768, 768)), "bilinear", (0.0, 0.0, 0.0), 48)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 224}, "takes 96 x 96 pixels"),
        ({"vision_config": {}}, "takes 768 x 768 pixels"),
        ({"vision_soft_tokens_per_image": 10}, "10, not a square"),
        ({"vision_soft_tokens_per_image": 25}, "25, not a square whose side divides 96"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        info_of(**options)
