"""Phi-4-reasoning-vision: limits of patches, and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family
import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.resolve import load_processing
from sensorium.mm.types import MediaHeader
from sensorium.models.families.phi4_vision.model import Phi4Vision
from sensorium.models.families.phi4_vision.processing import OwnPatches, Phi4VisionProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.text.tokenizer import Tokenizer


def info_of(options: dict[str, Any], image: dict[str, Any] | None = None, **config: Any) -> Phi4VisionProcessingInfo:
    return Phi4VisionProcessingInfo(ProcessorFiles(config=config, image=image or {}), options)


def test_published_limits() -> None:
    """The checkpoint's config states them; its preprocessor's JSON and the caller override them."""
    assert info_of({}).specs["image"].tiling == OwnPatches(16, 256, 3600)
    assert info_of({}, min_num_patches=100, max_num_patches=900).specs["image"].tiling == OwnPatches(16, 100, 900)
    assert info_of({}, {"max_num_patches": 700}, max_num_patches=900).specs["image"].tiling.most == 700
    assert info_of({"max_num_patches": 300}, {"max_num_patches": 700}).specs["image"].tiling.most == 300
    assert info_of({"detail": "low"}).specs["image"].tiling.most == 512
    assert info_of({}, mm_vision_tower="google/siglip2-so400m-patch14-naflex").specs["image"].patch == 14


@pytest.mark.parametrize(("size", "rows"), [((480, 640), 1200), ((16, 16), 256), ((4000, 3000), 3588), ((495, 640), 1170)])
def test_rows(size: tuple[int, int], rows: int) -> None:
    assert info_of({}).geometry(MediaHeader("image", *size)).num_embeds == rows


@pytest.mark.parametrize("options", [{"max_num_patches": 200}, {"max_num_patches": 1 << 20}])
def test_limits_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        info_of(options)


@pytest.mark.parametrize("change", [{"mm_projector_type": "linear"}, {"mm_vision_tower": "google/siglip-so400m-patch14-384"}])
def test_other_towers_and_projectors_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Phi4Vision({"vision_config": {}, **change}, torch.float32, torch.device("meta"))


def test_messages_name_the_text_of_a_placeholder(tmp_path: Path) -> None:
    """Its token has no text in the tokenizer."""
    folder = family.save(family.load_rows()["phi4_vision"], tmp_path / "model")
    tokenizer = Tokenizer(folder)
    info = load_processing(load_model_files(folder), {}, tokenizer)
    inputs = InputProcessor(info, tokenizer, MultiModalSettings(dtype=torch.float32), 1 << 12)
    assert tokenizer.decode([info.placeholder_ids["image"]], skip_special_tokens=False) == ""
    assert inputs.text.text_of(info.placeholder_ids["image"]) == "<image>"
