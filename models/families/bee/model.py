"""Bee (Open-Bee/Bee-8B): LLaVA-OneVision with Qwen3 and a wider projector behind a norm (arXiv 2510.13795; vLLM's bee.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...layers.connectors import Projector, ProjectorSpec
from ..llava.model import LlavaOnevision


class Bee(LlavaOnevision):
    """The projector is always GELU between two layers with biases, and four times as wide inside as the decoder."""

    text = "qwen3"

    def build_projectors(self, config: Mapping[str, Any]) -> None:
        projector = ProjectorSpec(
            width=self.vision_tower.spec.width * len(self.layers),
            out=self.hidden_size,
            layers=("linear_1", "linear_2"),
            inner=4 * self.hidden_size,
            norm="pre_norm",
            eps=1e-6,
        )
        self.multi_modal_projector = Projector(projector, self.dtype, self.vision_tower.device)
