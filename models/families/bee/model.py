"""Bee (Open-Bee/Bee-8B) and R-4B: LLaVA-OneVision with Qwen3 and a norm before the projector.

Sources: arXiv 2510.13795 (Bee), 2508.21113 (R-4B), vLLM's bee.py and rvl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...layers.connectors import Projector, ProjectorSpec
from ..llava.model import LlavaOnevision


class Bee(LlavaOnevision):
    """The projector is always GELU between two layers with biases.

    `expansion`: its inner width, as a multiple of the decoder's.
    """

    text = "qwen3"
    expansion: ClassVar[int] = 4

    def build_projectors(self, config: Mapping[str, Any]) -> None:
        projector = ProjectorSpec(
            width=self.vision_tower.spec.width * len(self.layers),
            out=self.hidden_size,
            layers=("linear_1", "linear_2"),
            inner=self.expansion * self.hidden_size,
            norm="pre_norm",
            eps=1e-6,
        )
        self.multi_modal_projector = Projector(projector, self.dtype, self.vision_tower.device)


class R(Bee):
    """R-4B, whose projector is as wide as the decoder."""

    expansion = 1
