"""InternVL: a tower with layer scale, squares of patches joined, any decoder. Sources: arXiv 2312.14238, 2404.16821."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..mm.errors import ConfigError
from .config import count, decoder_spec, need
from .layers.connectors import ProjectorSpec
from .text.stacks import stack_of
from .tower_model import TOWER_PREFIXES, TowerModel, state_of
from .vision.spec import TableSpec, TowerNames, TowerSpec

_VISION: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 448,
    "patch_size": 14, "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
}  # fmt: skip
_NAMES = TowerNames(
    patch="embeddings.patch_embeddings.projection",
    table="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    post_norm="layernorm",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    qk_norms=("attention.q_norm", "attention.k_norm"),
)


class InternVL(TowerModel):
    """InternVL in the layout of the Hub."""

    prefixes = TOWER_PREFIXES
    ignored = ("tower.embeddings.mask_token",)  # of training

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config, "qwen2")
        text = decoder_spec(config, replace(stack, defaults={"tie_word_embeddings": True} | dict(stack.defaults)))
        tower = _tower(config)
        projector = ProjectorSpec(
            width=tower.width,
            out=text.hidden_size,
            layers=("linear_1", "linear_2"),
            group=tower.merge**2,
            inner=text.hidden_size,
            act=config.get("projector_hidden_act", "gelu"),
            norm="layer_norm",
            joined_norm=True,
        )
        super().__init__(text, tower, projector, dtype, device)


def _tower(config: Mapping[str, Any]) -> TowerSpec:
    vision = {**_VISION, **need(config, "vision_config")}
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise ConfigError("vision_feature_select_strategy keeps the class token; known is default, which leaves it out")
    if not vision.get("use_absolute_position_embeddings", True):
        raise ConfigError("vision_config switches position embeddings off; this tower has them")
    patch, side = (_square(vision[key], key) for key in ("patch_size", "image_size"))
    depth = count(vision, "num_hidden_layers")
    features = state_of(config.get("vision_feature_layer", -1), depth)
    return TowerSpec(
        depth=depth,
        width=count(vision, "hidden_size"),
        heads=count(vision, "num_attention_heads"),
        inner=count(vision, "intermediate_size"),
        patch_dim=vision["num_channels"] * patch**2,
        act=vision["hidden_act"],
        merge=round(1 / config.get("downsample_ratio", 0.5)),
        eps=vision["layer_norm_eps"],
        rms=vision.get("norm_type", "layer_norm") == "rms_norm",
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm="all" if vision.get("use_qk_norm", False) else None,
        table=TableSpec(side // patch),
        class_token=True,
        post_norm=not vision.get("use_mean_pooling", True) and not features,
        layer_scale=True,
        features=features,
        names=_NAMES,
    )


def _square(value: Any, key: str) -> int:
    """A side that is given once or twice."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ConfigError(f"{key} in vision_config is {value}; only squares are supported")
    return count({key: sides.pop()}, key)
