"""Eagle2.5-VL: SigLIP on tiles, pixel shuffle and a Qwen or Llama decoder (arXiv 2504.15271)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....checkpoints.config import require
from ....mm.geometry import pixel_shuffle_side
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TowerModel, feature_states
from ...vision.encoders import encoder_spec

_LAYERS = {1: ("0",), 2: ("1", "3")}
"""Number of layers of the projector -> their names. Two have a norm before them."""


class EagleVL(TowerModel):
    prefixes = (
        ("vision_model.vision_model.", "tower."),
        ("vision_model.", "tower."),
        ("mlp1.", "projector."),
        *TEXT_PREFIXES,
    )
    ignored = ("tower.head.",)  # pools the rows to one vector

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, layers = decoder_spec(config, stack_of(config, "qwen2")), config.get("mlp_connector_layers", 2)
        if layers not in _LAYERS:
            raise ConfigError(f"mlp_connector_layers in config.json is {layers!r}; 1 and 2 are supported")
        merge = pixel_shuffle_side(config) if config.get("use_pixel_shuffle", True) else 1
        vision, layer = require(config, "vision_config"), config.get("select_layer", -4)
        tower = encoder_spec(vision, "siglip_vision_model", merge=merge, post_norm=layer == -1)
        if layer != -1:
            tower = encoder_spec(vision, "siglip_vision_model", merge=merge, features=feature_states(layer, tower.depth))
        projector = ProjectorSpec(
            width=tower.width,
            out=text.hidden_size,
            layers=_LAYERS[layers],
            group=merge**2,
            inner=text.hidden_size,
            norm="0" if layers == 2 else None,
            joined_norm=True,
        )
        super().__init__(text, tower, projector, dtype, device)
