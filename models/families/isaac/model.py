"""Isaac (Perceptron): images at native size, SigLIP 2's tower, squares of patches merged, a Qwen3 decoder with M-RoPE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import get_text_config, positive_int, require
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import TowerModel
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec

_ENCODER = "siglip_vision_model"
_VISION = {"patch_size": 16, "num_patches": 256, "pixel_shuffle_scale_factor": 1, "model_type": _ENCODER}


class Isaac(TowerModel):
    """A model of images. Half of the rotary frequencies turn by time, a quarter each by line and by column."""

    prefixes = (
        ("model.vision_embedding.0.", "tower."),
        ("model.vision_embedding.1.", "projector.linear_1."),
        ("model.vision_embedding.3.", "projector.linear_2."),
        ("model.vision_embedding.transformer.", "tower."),
        ("model.vision_embedding.linear_fc1.", "projector.linear_1."),
        ("model.vision_embedding.linear_fc2.", "projector.linear_2."),
        ("model.text_model.lm_head.", "head.lm_head."),
        ("model.text_model.", "language_model."),
        ("model.lm_head.", "head.lm_head."),
        ("lm_head.", "head.lm_head."),
        ("model.", "language_model."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config"), "model_type": _ENCODER}
        merge, side = positive_int(vision, "pixel_shuffle_scale_factor"), isqrt(positive_int(vision, "num_patches"))
        self.patch = positive_int(vision, "patch_size")
        table = TableSpec(side, "bilinear", antialias=True)
        vision["image_size"] = side * self.patch
        tower = encoder_spec(vision, _ENCODER, table=table, merge=merge, post_norm=True)
        text, inner = decoder_spec(_with_sections(config), STACKS["qwen3"]), tower.width * merge**2
        layers = ("linear_1", "linear_2")
        projector = ProjectorSpec(tower.width, text.hidden_size, layers, merge**2, 4 * inner, "silu", bias=False)
        super().__init__(text, tower, projector, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Reorder the weight of the patches, whose channels come last."""
        for name, tensor in weights:
            if name.endswith("embeddings.patch_embedding.weight"):
                tensor = tensor.unflatten(1, (self.patch, self.patch, -1)).permute(0, 3, 1, 2).flatten(1)
            yield name, tensor


def _with_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the sections of the rotary frequencies, which the published code computes from the head size."""
    text = get_text_config(config)
    heads = positive_int({"num_attention_heads": 32, **text}, "num_attention_heads")
    dim = text.get("head_dim") or positive_int(text, "hidden_size") // heads
    rope = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or text.get("rope_theta") or 10000.0
    sections = {"rope_type": "default", "rope_theta": theta, "mrope_section": [dim // 4, dim // 8, dim // 8]}
    return {**config, "text_config": {**text, "rope_scaling": None, "rope_parameters": sections}}
