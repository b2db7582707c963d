"""Options by modality: flat and nested ones, and how wrong ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from sensorium.callers.errors import ConfigError
from sensorium.processors.options import VALUES, for_modality

KNOWN = {"image": ("size",), "video": ("fps", "size"), "audio": ()}


@pytest.mark.parametrize("name", ["audio_kwargs", "audios_kwargs"])
def test_audio_may_be_spelled_as_transformers_does(name: str) -> None:
    assert for_modality({name: {"gain": 2}}, "audio", {"audio": ("gain",)}) == {"gain": 2}
    assert for_modality({name: {}}, "audio", KNOWN) == {}
    with pytest.raises(ConfigError, match=r"'gain' for audios; this model has no options for audios, leave it out$"):
        for_modality({name: {"gain": 2}}, "audio", KNOWN)
    with pytest.raises(ConfigError, match=f"unknown processing option '{name}'"):
        for_modality({name: {}}, "image", {"image": ("size",)})


def test_an_option_of_another_modality_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"'fps' for images; it is one of videos_kwargs$"):
        for_modality({"images_kwargs": {"fps": 2.0}}, "video", KNOWN)
    with pytest.raises(ConfigError, match=r"'size' for audios; it is one of images_kwargs and videos_kwargs$"):
        for_modality({"audio_kwargs": {"size": 2}}, "video", KNOWN)


def test_the_device_is_no_option_of_items() -> None:
    for options in ({"device": "cuda"}, {"images_kwargs": {"device": "cuda"}}):
        with pytest.raises(ConfigError, match=r"device is not an option of items; LLM\(..., media_device='cuda'\)"):
            for_modality(options, "image", KNOWN)


def test_a_family_without_options_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'sampling_rate'; the known ones are audios_kwargs, audio_kwargs$"):
        for_modality({"sampling_rate": 8000}, "audio", {"audio": ()})


@pytest.mark.parametrize("value", [5, 0, "", [], np.zeros(2)], ids=repr)
def test_the_options_of_a_modality_are_a_mapping(value: object) -> None:
    with pytest.raises(ConfigError, match="images_kwargs holds options by name"):
        for_modality({"images_kwargs": value}, "image", KNOWN)


def test_options_of_one_family_have_their_values_in_the_family() -> None:
    known, values = {"image": ("gain",)}, {**VALUES, "gain": (True, False)}
    assert for_modality({"gain": True}, "image", known, values) == {"gain": True}
    with pytest.raises(ConfigError) as caught:
        for_modality({"gain": 2}, "image", known, values)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "gain")
