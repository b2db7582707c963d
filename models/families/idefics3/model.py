"""Idefics3 and SmolVLM (arXiv 2408.12637): tiles of one size, pixel shuffle, one linear projection, any decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TowerModel
from ...vision.encoders import encoder_spec, with_defaults
from ...vision.spec import TableSpec, TowerSpec

_ENCODER = "siglip_vision_model"
VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16, "image_size": 224,
    "patch_size": 32,
}  # fmt: skip


class Idefics3(TowerModel):
    """A model of images and videos, whose frames come in tiles of one size, with bucketed position embeddings."""

    prefixes = (
        ("model.vision_model.", "tower."),
        ("model.connector.modality_projection.", "projector."),
        ("model.text_model.", "language_model."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = decoder_spec(config, stack_of(config))
        merge = config.get("scale_factor", 2)
        tower = bucketed_tower({**VISION, **require(config, "vision_config")}, merge)
        projector = ProjectorSpec(tower.width, text.hidden_size, ("proj",), group=merge**2, bias=False)
        super().__init__(text, tower, projector, dtype, device)


def bucketed_tower(vision: Mapping[str, Any], merge: int = 1) -> TowerSpec:
    """Return SigLIP's tower for images of many sizes, with bucketed position embeddings, from a vision config."""
    vision = with_defaults({**vision, "model_type": _ENCODER}, _ENCODER)
    table = TableSpec(positive_int(vision, "image_size") // positive_int(vision, "patch_size"), fit="buckets")
    return encoder_spec(vision, _ENCODER, table=table, merge=merge, post_norm=True)
