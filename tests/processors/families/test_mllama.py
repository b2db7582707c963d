"""Mllama's prompts: one token per image, which stays in the prompt, or no image at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
from PIL import Image
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.frontend.processed_prompt import ProcessedPrompt
from sensorium.mm.errors import ConfigError, InputError
from sensorium.mm.types import MediaHeader
from sensorium.processors.families.mllama import MllamaProcessingInfo
from sensorium.processors.files import ProcessorFiles

INFO = MllamaProcessingInfo(ProcessorFiles(config={}))
IMAGE, ROWS = 128256, 1 + 16 * 16  # of a tile of 224 pixels


class Tokens:
    """The tokenizer that names tokens in errors."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{number}>" for number in ids)


def process(ids: list[int], images: int = 0) -> ProcessedPrompt:
    inputs = InputProcessor(INFO, cast(Any, Tokens()), MultiModalSettings(), 4096)
    several = [Image.new("RGB", (300, 100), (value, 0, 0)) for value in range(images)]
    return inputs.process({"prompt_token_ids": ids, "multi_modal_data": {"image": several} if images else {}})


def test_the_range_of_an_image_begins_at_its_token_and_is_as_long_as_its_rows():
    prompt = process([5, 6, IMAGE, 7], 1)
    assert prompt.token_ids == (5, 6, IMAGE, 7)
    assert not prompt.features
    assert prompt.cross is not None
    assert (prompt.cross.range.offset, prompt.cross.range.num_embeds) == (2, 4 * ROWS)
    assert (prompt.cross.geometry.tiles, prompt.cross.geometry.hidden) == ((1, 2), 2 * ROWS)


def test_a_prompt_needs_no_image():
    prompt = process([5, 6, 7])
    assert prompt.token_ids == (5, 6, 7)
    assert prompt.cross is None


@pytest.mark.parametrize(("ids", "images"), [([5], 1), ([5, IMAGE, IMAGE], 1)])
def test_a_prompt_with_another_number_of_tokens_than_images_is_refused(ids: list[int], images: int):
    with pytest.raises(InputError, match=rf"has {len(ids) - 1} of <{IMAGE}> for {images} items; write it once for each item"):
        process(ids, images)


def test_a_second_image_is_refused():
    with pytest.raises(InputError, match="At most 1 image"):
        process([IMAGE, 5, IMAGE], 2)


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
