"""NVLM-D (arXiv 2409.11402): InternVL in its publisher's layout with another projector. Source: vLLM's nvlm_d.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....checkpoints.config import positive_int, require
from ...layers.connectors import ProjectorSpec
from ...text.spec import DecoderSpec
from ...vision.spec import TowerSpec
from ..internvl.model import InternVLChat


class NvlmD(InternVLChat):
    """The projector is as wide inside as the decoder's MLPs, and has no biases."""

    def specs(self, config: Mapping[str, Any]) -> tuple[DecoderSpec, TowerSpec, ProjectorSpec]:
        text, tower, projector = super().specs(config)
        inner = positive_int(require(config, "text_config"), "intermediate_size")
        return text, tower, replace(projector, inner=inner, bias=False)
