"""The registry: the entry that a checkpoint uses."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import ConfigError
from sensorium.models.registry import CHECKPOINT_LAYOUTS, architecture_key, find_architecture, native_architectures

ARCHITECTURES = native_architectures()


def test_an_entry_may_be_for_one_model_type():
    special = [name for name in ARCHITECTURES if "/" in name]
    assert special
    for name in special:
        architecture, kind = name.split("/")
        for config in (
            {"vision_config": {"model_type": kind}},
            {"model_type": kind},
            {"vision_config": {}, "model_type": kind},
        ):
            assert architecture_key(architecture, config) == name
        for config in ({}, {"vision_config": None}, {"vision_config": {"model_type": "another"}}, {"model_type": "another"}):
            assert architecture_key(architecture, config) == architecture


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("LightOnOCRForConditionalGeneration", "LightOnOcrForConditionalGeneration"),
        ("Ernie4_5_VLMoEForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration"),
        ("Qwen3OmniMoEForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
    ],
)
def test_case_and_underscores_do_not_matter(published, name):
    assert find_architecture(architecture_key(published, {})) == find_architecture(name)
    assert all(find_architecture(architecture_key(known, {})) is row for known, row in ARCHITECTURES.items())


def test_checkpoint_layouts_name_known_architectures():
    for layout in CHECKPOINT_LAYOUTS.values():
        assert all(find_architecture(name) for name in layout.architectures.values())


def test_an_unknown_architecture_names_the_nearest_one():
    name = next(iter(ARCHITECTURES))
    with pytest.raises(ConfigError, match=name):
        find_architecture(name[:-1])
