"""The registry: which row a checkpoint takes."""

from __future__ import annotations

import pytest
from sensorium.mm.errors import ConfigError
from sensorium.mm.registry import ARCHITECTURES, CHECKPOINT_LAYOUTS, architecture_key, find_architecture


def test_a_row_may_be_of_an_architecture_with_one_kind_of_tower():
    special = [name for name in ARCHITECTURES if "/" in name]
    assert special
    for name in special:
        architecture, kind = name.split("/")
        assert architecture_key(architecture, {"vision_config": {"model_type": kind}}) == name
        for config in ({}, {"vision_config": None}, {"vision_config": {"model_type": "another"}}):
            assert architecture_key(architecture, config) == architecture


def test_layouts_lead_to_rows():
    for layout in CHECKPOINT_LAYOUTS.values():
        assert all(find_architecture(name) for name in layout.architectures.values())


def test_an_unknown_architecture_names_its_neighbours():
    name = next(iter(ARCHITECTURES))
    with pytest.raises(ConfigError, match=name):
        find_architecture(name[:-1])
