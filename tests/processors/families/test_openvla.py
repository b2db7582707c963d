"""OpenVLA: where the image goes, the form of questions, and configs that are refused."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.openvla.model import tower_specs
from sensorium.models.families.openvla.processing import OpenVLAProcessingInfo
from sensorium.processors.files import ProcessorFiles

SIGLIP = "vit_so400m_patch14_siglip_224"


def info_of(image: dict[str, Any] | None = None, **config: Any) -> OpenVLAProcessingInfo:
    return OpenVLAProcessingInfo(ProcessorFiles(config=config, image=image or {}), {})


def test_the_image_follows_the_first_token() -> None:
    info = info_of()
    assert info.preprocess_prompt([1, 512, 29901], {"image": 1}) == [1, 32000, 512, 29901]
    assert info.preprocess_chat([512], {"image": 1}) == [32000, 512]
    for ids, count in (([1, 512], 0), ([1, 512, 32000], 1)):
        assert info.preprocess_prompt(ids, {"image": count}) == ids
    assert info.geometry(MediaHeader("image", 480, 640)).num_embeds == 256


def test_a_conversation() -> None:
    question = [{"type": "image"}, {"type": "text", "text": "What action should the robot take to open the drawer?"}]
    template = jinja2.Environment().from_string(OpenVLAProcessingInfo.chat_template or "")
    text = template.render(messages=[{"role": "user", "content": question}])
    assert text == "In: What action should the robot take to open the drawer?\nOut:"


def test_the_published_towers() -> None:
    dino, siglip = tower_specs({})
    assert (dino.width, dino.inner, dino.registers, dino.states) == (1024, 4096, 5, (23,))
    assert (siglip.width, siglip.inner, siglip.registers, siglip.states) == (1152, 4304, 0, (26,))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timm_model_ids": ["vit_huge", SIGLIP]}, "'vit_huge'; known are"),
        ({"timm_model_ids": [SIGLIP]}, "names one vision tower"),
        ({"use_fused_vision_backbone": False}, "names one vision tower"),
        ({"timm_override_act_layers": ["quick_gelu", None]}, "default activations"),
    ],
)
def test_other_towers_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tower_specs(config)


def test_other_ways_to_prepare_an_image_are_refused() -> None:
    with pytest.raises(ConfigError, match="only resize-naive"):
        info_of({"image_resize_strategy": "letterbox"})
    with pytest.raises(ConfigError, match="each of the two towers"):
        info_of({"means": [[0.5, 0.5, 0.5]]})
    with pytest.raises(ConfigError, match="both towers must take the same size"):
        info_of(image_sizes=[224, 384])
