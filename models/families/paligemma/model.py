"""PaliGemma and PaliGemma 2: SigLIP, one linear projection, a Gemma decoder (arXiv 2407.07726, 2412.03555)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....checkpoints.config import require
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TOWER_PREFIXES, TowerModel
from ...vision.encoders import encoder_spec

_VISION: Mapping[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 224,
}  # fmt: skip


class PaliGemma(TowerModel):
    """A model of images, with one row per patch."""

    prefixes = TOWER_PREFIXES
    ignored = ("tower.head.", "tower.embeddings.position_ids")  # a pooling head; a buffer in old checkpoints

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text_config = {**require(config, "text_config"), "use_bidirectional_attention": None}  # the processor says where
        text = decoder_spec({**config, "text_config": text_config}, stack_of(config, "gemma"))
        vision = config.get("vision_config") or _VISION
        tower = encoder_spec(vision, "siglip_vision_model", post_norm=True)
        projector = ProjectorSpec(tower.width, text.hidden_size, ("linear",))
        super().__init__(text, tower, projector, dtype, device)
