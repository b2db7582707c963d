"""Llama 4 (the publisher's modelling file in transformers): tiles through a tower with rotary positions, pixel shuffle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import get_text_config, positive_int
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TowerModel
from ...vision.spec import RotarySpec, TableSpec, TowerNames, TowerSpec

VISION: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632, "image_size": 448,
    "patch_size": 14, "num_channels": 3, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
}  # fmt: skip
_NAMES = TowerNames(
    patch="patch_embedding.linear",
    table="positional_embedding_vlm",
    class_token="class_embedding",
    pre_norm="layernorm_pre",
    post_norm="layernorm_post",
    layers="model.layers",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
)


class Llama4(TowerModel):
    """A model of images in tiles."""

    prefixes = (
        ("vision_model.vision_adapter.mlp.", "projector."),
        ("multi_modal_projector.", "projector."),
        ("vision_model.", "tower."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.stack = stack_of({**get_text_config(config), "model_type": "llama4_text"})
        text, vision = decoder_spec(config, self.stack), {**VISION, **(config.get("vision_config") or {})}
        tower = _tower(vision)
        inner = positive_int(vision, "projector_input_dim")
        for key in ("projector_output_dim", "vision_output_dim"):
            if vision.get(key, inner) != inner:
                raise ConfigError(f"{key} in vision_config is {vision[key]}; it must be projector_input_dim, {inner}")
        projector = ProjectorSpec(
            tower.width, text.hidden_size, ("fc1", "fc2", "linear_1"), group=tower.merge**2, inner=inner, bias=False
        )
        super().__init__(text, tower, projector, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the decoder's tensors. The class token's position comes last in the checkpoint, and first in our tower."""
        for name, tensor in weights:
            for old, new in self.stack.renames:
                name = name.replace(old, new)
            yield name, tensor.roll(1, 0) if name.endswith(_NAMES.table) and tensor.numel() else tensor


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    patch = positive_int(vision, "patch_size")
    theta = (vision.get("rope_parameters") or {}).get("rope_theta") or vision.get("rope_theta", 10000.0)
    return TowerSpec(
        depth=positive_int(vision, "num_hidden_layers"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=positive_int(vision, "num_channels") * patch**2,
        merge=round(1 / vision["pixel_shuffle_ratio"]),
        eps=1e-5,  # the published class ignores norm_eps
        patch_bias=False,
        rotary=RotarySpec(theta, "columns_first", interleaved=True, first=1),
        table=TableSpec(positive_int(vision, "image_size") // patch),
        class_token=True,
        pre_norm=True,
        post_norm=True,
        names=_NAMES,
    )
