"""Aya Vision and Cohere2-Vision (arXiv 2505.08751): SigLIP over tiles, pixel shuffle, a gated projector, any decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TOWER_PREFIXES, TowerModel, numbers_of_states
from ...vision.encoders import encoder_spec, with_defaults

_SIGLIP = "siglip_vision_model"


class AyaVision(TowerModel):
    """Aya Vision: the state of one layer of the tower, normed before it is projected."""

    prefixes = TOWER_PREFIXES
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384, "num_hidden_layers": 26,
        "num_attention_heads": 14,
    }  # fmt: skip
    normed: ClassVar[bool] = True
    inner: ClassVar[int | None] = None

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"tie_word_embeddings": True, **config}
        text = decoder_spec(config, stack_of(config, "cohere2"))
        merge, vision = (
            config.get("downsample_factor", 2),
            with_defaults(config.get("vision_config") or self.vision_defaults, _SIGLIP),
        )
        features = self.features(config, positive_int(vision, "num_hidden_layers"))
        tower = encoder_spec(vision, _SIGLIP, merge=merge, post_norm=not self.normed, features=features)
        projector = ProjectorSpec(
            width=tower.width,
            out=text.hidden_size,
            layers=("linear_1", "linear_2"),
            group=merge**2,
            inner=(config.get("alignment_intermediate_size") or self.inner or text.hidden_size) // 2,
            act="silu",
            gated=True,
            norm="layernorm" if self.normed else None,
            eps=config.get("adapter_layer_norm_eps", 1e-6),
            joined_norm=True,
        )
        super().__init__(text, tower, projector, dtype, device)
        self.ignored = (*self.ignored, "tower.head.")  # a pooling head

    def features(self, config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
        """Return `TowerSpec.features`."""
        if config.get("vision_feature_select_strategy", "full") != "full":
            raise ConfigError(
                "vision_feature_select_strategy drops a class token, but this tower has none; only full is supported"
            )
        states = numbers_of_states(config.get("vision_feature_layer", -1), depth)
        if len(states) > 1:
            raise ConfigError("vision_feature_layer in config.json is several layers; the model's projector takes a single one")
        return states


class Cohere2Vision(AyaVision):
    """Cohere2-Vision: the tower's normed last state."""

    vision_defaults = {
        "hidden_size": 1152, "intermediate_size": 3072, "image_size": 512, "num_hidden_layers": 27, "num_attention_heads": 12,
    }  # fmt: skip
    normed = False
    inner = 36864

    def features(self, config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
        return ()
