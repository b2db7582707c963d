"""PaddleOCR-VL (arXiv 2510.14528): pages at native size, SigLIP with 2-D rotary positions, an Ernie 4.5 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...native_model import NativeModel, axial_theta
from ...text.decoder_config import decoder_spec
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...vision.encoders import encoder_spec
from ...vision.spec import RotarySpec, TableSpec

_ERNIE = STACKS["ernie4_5"]
_STACK = replace(_ERNIE, defaults={**_ERNIE.defaults, "mrope_section": (16, 24, 24)}, interleaved=False)
_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384,
    "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip


class PaddleOcrVL(NativeModel):
    """A model of images. The text config may be at the top level of config.json.

    `stack`: the decoder's features. `vision_defaults`: values of the vision config that config.json leaves out.
    `temporal_attention`: as in TowerSpec. `joined_norm`: as in ProjectorSpec.
    """

    stack: ClassVar[Stack] = _STACK
    vision_defaults: ClassVar[Mapping[str, Any]] = _VISION
    temporal_attention: ClassVar[bool] = False
    joined_norm: ClassVar[bool] = False
    prefixes = (
        ("model.visual.vision_model.", "visual."),
        ("visual.vision_model.", "visual."),
        ("model.projector.", "merger."),
        ("mlp_AR.", "merger."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )
    ignored = (  # a pooling head, a position table for packing, a buffer in old checkpoints
        "visual.head.",
        "visual.embeddings.packing_position_embedding.",
        "visual.embeddings.position_ids",
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**self.vision_defaults, **require(config, "vision_config"), "model_type": "siglip_vision_model"}
        decoder, merge = decoder_spec(config, self.stack), positive_int(vision, "spatial_merge_size")
        tower = encoder_spec(vision, "siglip_vision_model", merge=merge, post_norm=True, rotary=RotarySpec(axial_theta(vision)))
        assert tower.table is not None
        tower = replace(tower, table=TableSpec(tower.table.side, "bilinear"), temporal_attention=self.temporal_attention)
        merger = ProjectorSpec(tower.width, decoder.hidden_size, ("linear_1", "linear_2"), merge**2, norm="pre_norm")
        super().__init__(decoder, tower, (replace(merger, joined_norm=self.joined_norm),), dtype, device)
