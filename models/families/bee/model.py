"""Bee (Open-Bee/Bee-8B) and R-4B: LLaVA-OneVision with Qwen3 and a norm before the projector.

Sources: arXiv 2510.13795 (Bee), 2508.21113 (R-4B), vLLM's bee.py and rvl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...layers.connectors import Projector, ProjectorSpec
from ..llava.model import LlavaOnevision


class Bee(LlavaOnevision):
    """The projector is four times as wide as the decoder."""

    text = "qwen3"

    def build_projectors(self, config: Mapping[str, Any]) -> None:
        self.multi_modal_projector = _projector(self, 4)


class R(LlavaOnevision):
    """R-4B, whose projector is as wide as the decoder."""

    text = "qwen3"

    def build_projectors(self, config: Mapping[str, Any]) -> None:
        self.multi_modal_projector = _projector(self, 1)


def _projector(model: LlavaOnevision, expansion: int) -> Projector:
    """Return a projector with a norm and GELU between two layers with biases.

    `expansion`: its inner width, as a multiple of the decoder's.
    """
    spec = ProjectorSpec(
        width=model.vision_tower.spec.width * len(model.layers),
        out=model.hidden_size,
        layers=("linear_1", "linear_2"),
        inner=expansion * model.hidden_size,
        norm="pre_norm",
        eps=1e-6,
    )
    return Projector(spec, model.dtype, model.vision_tower.device)
