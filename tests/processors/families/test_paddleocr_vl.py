"""PaddleOCR-VL: the files of published checkpoints."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import ConfigError
from sensorium.models.families.paddleocr_vl.processing import PaddleOcrVLProcessingInfo
from sensorium.processors.files import ProcessorFiles


def test_frames_of_a_patch_in_the_vision_config_are_not_compared() -> None:
    """PaddleOCR-VL-1.5 states two there and one in the preprocessor's JSON; the tower takes single frames."""
    config = {"vision_config": {"temporal_patch_size": 2, "patch_size": 14}}
    info = PaddleOcrVLProcessingInfo(ProcessorFiles(config, {"temporal_patch_size": 1}))
    assert info.specs["image"].temporal == 1
    with pytest.raises(ConfigError, match="patch_size"):
        PaddleOcrVLProcessingInfo(ProcessorFiles({"vision_config": {"patch_size": 16}}, {"patch_size": 14}))
