"""Mllama's prompts: one token per image, which stays in the prompt, or no image at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
from PIL import Image
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.frontend.processed_prompt import ProcessedPrompt
from sensorium.mm.rules import Rule
from sensorium.mm.types import MediaHeader
from sensorium.models.families.mllama.processing import MllamaProcessingInfo
from sensorium.models.families.mllama.rules import rows_of_tiles
from sensorium.processors.files import ProcessorFiles

INFO = MllamaProcessingInfo(ProcessorFiles(config={}))
IMAGE, ROWS = 128256, 1 + 16 * 16  # of a tile of 224 pixels


class Tokens:
    """The tokenizer that names tokens in errors."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{number}>" for number in ids)


def process(ids: list[int], images: int = 0, **settings: Any) -> ProcessedPrompt:
    inputs = InputProcessor(INFO, cast(Any, Tokens()), MultiModalSettings(**settings), 4096)
    several = [Image.new("RGB", (300, 100), (value, 0, 0)) for value in range(images)]
    return inputs.process({"prompt_token_ids": ids, "multi_modal_data": {"image": several} if images else {}})


def test_the_range_of_an_image_begins_at_its_token_and_is_as_long_as_its_rows():
    prompt = process([5, 6, IMAGE, 7], 1)
    assert prompt.token_ids == (5, 6, IMAGE, 7)
    assert not prompt.features
    (item,) = prompt.cross
    assert (item.range.offset, item.range.num_embeds) == (2, 4 * ROWS)
    assert (item.geometry.tiles, item.geometry.visible) == ((1, 2), Rule.of(rows_of_tiles, 2 * ROWS))
    assert item.geometry.visible(4 * ROWS) == 2 * ROWS


def test_a_prompt_needs_no_image():
    prompt = process([5, 6, 7])
    assert prompt.token_ids == (5, 6, 7)
    assert not prompt.cross


@pytest.mark.parametrize(("ids", "images"), [([5], 1), ([5, IMAGE, IMAGE], 1), ([5, IMAGE], 2)])
def test_a_prompt_with_another_number_of_tokens_than_images_is_refused(ids: list[int], images: int):
    reason = f"has {ids.count(IMAGE)} of <{IMAGE}> for {images} items; write it once for each item"
    with pytest.raises(InputError, match=reason):
        process(ids, images)


def test_each_image_begins_at_its_own_token():
    prompt = process([5, IMAGE, IMAGE, 6, IMAGE, 7], 3)
    assert [item.range.offset for item in prompt.cross] == [1, 2, 4]
    assert len({item.hash for item in prompt.cross}) == 3
    assert [plan.num_embeds for plan in prompt.items] == [4 * ROWS] * 3


def test_the_callers_limit_of_images_holds():
    with pytest.raises(InputError, match="At most 1 image"):
        process([IMAGE, 5, IMAGE], 2, limits={"image": 1})


@pytest.mark.parametrize(("options", "tiles"), [({"detail": "low"}, (1, 1)), ({"max_image_tiles": 2}, (1, 2)), ({}, (1, 4))])
def test_options_limit_the_tiles_that_are_not_padding(options: dict[str, Any], tiles: tuple[int, int]):
    geometry = INFO.with_kwargs({"images_kwargs": options}).geometry(MediaHeader("image", 224, 700))
    assert geometry.tiles == tiles
    assert geometry.num_embeds == 4 * ROWS


def test_more_tiles_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match="max_image_tiles is 5, the limit is 4"):
        INFO.with_kwargs({"images_kwargs": {"max_image_tiles": 5}})


def test_an_image_in_a_later_prompt_of_a_session_is_refused():
    inputs = InputProcessor(INFO, cast(Any, Tokens()), MultiModalSettings(), 4096)
    later = {"prompt_token_ids": [IMAGE, 5], "multi_modal_data": {"image": Image.new("RGB", (300, 100))}}
    with pytest.raises(InputError, match="with its first prompt only"):
        inputs.parse(later, more=True)


@pytest.mark.parametrize(
    "text", ["hello", "<|image|>hello", "<|image|><|image|> a", "a<|image|>b", "<bos>a", "<|image|><bos>a", "a <bos>", ""]
)
def test_the_first_token_stands_where_the_published_processor_puts_it(text: str):
    from transformers.models.mllama.processing_mllama import build_string_from_input

    assert INFO.preprocess_text(text, "<bos>") == build_string_from_input(text, "<bos>", "<|image|>")
    assert INFO.preprocess_text(text, None) == text
