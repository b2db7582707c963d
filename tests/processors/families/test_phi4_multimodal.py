"""Phi-4-multimodal and Phi-3-vision: published sizes, options, prompts, and audio beside an image."""

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.phi3_vision.processing import Phi3VProcessingInfo
from sensorium.models.families.phi4_multimodal.processing import Phi4MMProcessingInfo, Phi4MultimodalProcessingInfo
from sensorium.processors.files import ProcessorFiles


def image(height, width):
    return MediaHeader("image", height, width)


def test_published_counts_of_phi4():
    """256 + 1 + 16 rows of the whole image and the separator, and those of the tiles: 16, 24 x 32 and 48 x 12 in lines."""
    info = Phi4MultimodalProcessingInfo(ProcessorFiles(config={}))
    for size, rows in {(448, 448): 16 * 17, (480, 640): 24 * 33, (1000, 250): 48 * 13}.items():
        assert info.geometry(image(*size)).num_embeds == rows + 273, size
    with pytest.raises(InputError, match="crop"):
        info.geometry(image(1000, 4))


def test_options_of_phi4():
    info = Phi4MultimodalProcessingInfo(ProcessorFiles(config={}))
    assert info.with_kwargs({"dynamic_hd": 1}).geometry(image(2000, 2000)).num_embeds == 545
    assert info.with_kwargs({"detail": "low"}).geometry(image(2000, 2000)).num_embeds == 545
    assert info.shrink_kwargs("image", (9000, 1, 1), 1100) == {"dynamic_hd": 3}
    assert info.shrink_kwargs("image", (9000, 1, 1), 300) is None
    with pytest.raises(ConfigError, match="patch_size"):
        Phi4MultimodalProcessingInfo(ProcessorFiles(config={}, image={"size": {"height": 378, "width": 378}}))


def test_audio_beside_an_image_is_another_item():
    info = Phi4MMProcessingInfo(ProcessorFiles(config={}))
    assert info.prompt_kwargs({"audio": 1}) == info.prompt_kwargs({"image": 2}) == {}
    beside = info.with_kwargs(info.prompt_kwargs({"image": 1, "audio": 1}))
    assert beside.options_key("audio") != info.options_key("audio")
    assert beside.options_key("image") == info.options_key("image")


def test_published_counts_of_phi3():
    """The published formula: (tiles + 1) * 144 + 1 + (rows of tiles + 1) * 12."""
    info = Phi3VProcessingInfo(ProcessorFiles(config={}))
    for size, tiles in {(336, 336): (4, 4), (336, 672): (3, 5), (672, 336): (5, 3), (100, 4000): (1, 16)}.items():
        grid = info.geometry(image(*size))
        assert grid.tiles == tiles, size
        assert grid.num_embeds == (tiles[0] * tiles[1] + 1) * 144 + 1 + (tiles[0] + 1) * 12
    assert info.with_kwargs({"num_crops": 4}).geometry(image(336, 336)).tiles == (2, 2)
    assert info.shrink_kwargs("image", (2509, 1, 1), 800) == {"num_crops": 4}


def test_text_after_an_image_of_phi3_starts_anew():
    """The published processor tokenizes the texts around images one by one, each with the token that the tokenizer adds."""
    info = Phi3VProcessingInfo(ProcessorFiles(config={"bos_token_id": 1}))
    assert info.preprocess_chat([1, 7, 32044, 8, 32044], {"image": 2}) == [1, 7, 32044, 1, 8, 32044, 1]
    assert info.preprocess_chat([7, 32044, 8], {"image": 1}) == [7, 32044, 8]
    assert info.preprocess_chat([1, 7], {}) == [1, 7]


@pytest.mark.parametrize("kind", [Phi4MultimodalProcessingInfo, Phi3VProcessingInfo])
def test_the_filter_of_the_json_does_not_choose_the_library_that_resizes_tiles(kind):
    plain, stated = (kind(ProcessorFiles(config={}, image=json)).specs["image"] for json in ({}, {"resample": 4}))
    assert (stated.filter, stated.resample) == (plain.filter, plain.resample)
    other = kind(ProcessorFiles(config={}, image={"resample": 4}), {"resample": "torch"}).specs["image"]
    assert (other.filter, other.resample) == ("bilinear", "torch")
