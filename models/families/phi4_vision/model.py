"""Phi-4-reasoning-vision: SigLIP 2 with the image's aspect ratio, an MLP over the rows of its layer before the last, Phi-4.

Sources: the publisher's class; vLLM's phi4siglip.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError, short_repr
from ....checkpoints.config import positive_int, require
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import TowerModel, feature_states
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec

_ENCODER, _PROJECTOR, _LAYER = "siglip_vision_model", "mlp2x_gelu", -2
_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "num_patches": 256,
}  # fmt: skip
_PATCH_WEIGHT = "embeddings.patch_embedding.weight"


class Phi4Vision(TowerModel):
    """A model of images."""

    prefixes = (
        ("model.vision_tower.vision_tower.vision_model.", "tower."),
        ("model.vision_tower.vision_tower.", "tower."),
        ("model.mm_projector.", "projector."),
        ("lm_head.", "head.lm_head."),
        ("model.", "language_model."),
    )
    ignored = ("tower.head.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        for key, value in (("mm_projector_type", _PROJECTOR), ("mm_vision_tower", "naflex")):
            if value not in str(config.get(key, value)).lower():
                raise ConfigError(f"{key} in config.json is {short_repr(config[key])}; only {value} is supported")
        vision = {**_VISION, "patch_size": patch_size(config), **require(config, "vision_config"), "model_type": _ENCODER}
        side, depth = math.isqrt(positive_int(vision, "num_patches")), positive_int(vision, "num_hidden_layers")
        vision["image_size"] = side * positive_int(vision, "patch_size")
        table = TableSpec(side, "bilinear", antialias=True)
        text = decoder_spec({key: value for key, value in config.items() if key != "vision_config"}, STACKS["phi3"])
        tower = encoder_spec(vision, _ENCODER, table=table, features=feature_states(_LAYER, depth))
        projector = ProjectorSpec(tower.width, text.hidden_size, ("0", "2"), inner=text.hidden_size)
        super().__init__(text, tower, projector, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors; the numbers of a patch are stored pixel by pixel, and here channel by channel."""
        for name, tensor in weights:
            if name.endswith(_PATCH_WEIGHT):
                side = math.isqrt(tensor.shape[1] // 3)
                tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)
            yield name, tensor


def patch_size(config: Mapping[str, Any]) -> int:
    """Return the pixels along a side of a patch, where the vision config does not state them."""
    return 14 if "patch14" in str(config.get("mm_vision_tower", "")).lower() else 16
