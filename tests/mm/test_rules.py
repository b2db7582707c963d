"""Rules: functions and parameters that travel as data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from prompt_attention import ATTENTIONS
from sensorium.callers.errors import ConfigError
from sensorium.engine.core.codec import decode, encode
from sensorium.mm.positions import mrope_positions
from sensorium.mm.rules import PromptAttention, Rule
from sensorium.mm.types import ItemGeometry, PlaceholderRange
from sensorium.models.families.minicpmv.rules import on_canvas

HUNYUAN = "sensorium.models.families.hunyuan_vl"


def test_a_geometry_with_rules_survives_a_message():
    visible = Rule(f"{HUNYUAN}.rules:lines_on_a_page")
    geometry = ItemGeometry(1, 2, 2, positions=Rule.of(on_canvas, (1, 2), (3, 4)), visible=visible)
    copied = decode(encode(geometry))
    assert copied == geometry
    assert copied.positions.params == ((1, 2), (3, 4))


def test_prompt_attention_survives_a_message():
    for attention in ATTENTIONS.values():
        assert decode(encode(attention)) == attention
    assert isinstance(decode(encode(ATTENTIONS["causal"])), PromptAttention)


def test_a_process_imports_the_rules_that_its_items_name():
    """Positions are computed from names alone; no processor or model of the family is imported."""
    script = f"""
import sys
from sensorium.mm.positions import mrope_positions
from sensorium.mm.rules import Rule
from sensorium.mm.types import ItemGeometry, PlaceholderRange
assert not any("families" in name for name in sys.modules)
image = ItemGeometry(1, 4, 4, 2, extra=4, positions=Rule("{HUNYUAN}.rules:lines_on_a_page"))
positions, _ = mrope_positions(10, [(PlaceholderRange(1, 8), image)], 4)
assert positions[1].tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 8, 9], positions
families = sorted(name for name in sys.modules if "sensorium.models.families." in name)
assert families == ["{HUNYUAN}", "{HUNYUAN}.rules"], families
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    "name", ["os:system", "sensorium.mm.rules:import_module", "sensorium.models.families.keye.rules:steps_of"]
)
def test_only_registered_functions_are_rules(name):
    """A module whose name does not end with "rules" is not even imported; steps_of is no rule."""
    image = replace(ItemGeometry(1, 1, 1), positions=Rule(name))
    with pytest.raises(ConfigError, match="is not registered"):
        mrope_positions(2, [(PlaceholderRange(0, 1), image)])
