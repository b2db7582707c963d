"""InternVL: a tower with layer scale, squares of patches joined, any decoder. Sources: arXiv 2312.14238, 2404.16821."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..mm.errors import ConfigError
from .config import count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES
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


_CHAT_VISION: Mapping[str, Any] = {
    **_VISION,
    "hidden_size": 3200, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 12800, "image_size": 224,
    "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False,
}  # fmt: skip
_CHAT_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding",
    class_token="embeddings.class_embedding",
    layers="encoder.layers",
    scales=("ls1", "ls2"),
)


class InternVL(TowerModel):
    """InternVL in the layout of the Hub."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = TOWER_PREFIXES
    names: ClassVar[TowerNames] = _NAMES
    ignored = ("tower.embeddings.mask_token",)  # of training

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config, "qwen2")
        text = decoder_spec(config, replace(stack, defaults={"tie_word_embeddings": True} | dict(stack.defaults)))
        tower = replace(_tower(config), names=self.names)
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


class InternVLChat(InternVL):
    """InternVL in its publisher's own layout: queries, keys and values as one matrix, the decoder's config as `llm_config`."""

    prefixes = (
        ("vision_model.", "tower."),
        ("mlp1.0.", "projector.layer_norm."),
        ("mlp1.1.", "projector.linear_1."),
        ("mlp1.3.", "projector.linear_2."),
        *TEXT_PREFIXES,
    )
    names = _CHAT_NAMES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hub_config(config), dtype, device)


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the publisher's own layout as the Hub has it; ConfigError for what only older models do."""
    vision, text = {**_CHAT_VISION, **need(config, "vision_config")}, need(config, "llm_config")
    if config.get("ps_version", "v1") != "v2":
        raise ConfigError("ps_version in config.json is not v2: rows of pictures would be turned; take a newer checkpoint")
    return {
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": vision | {"use_qk_norm": vision["qk_normalization"], "attention_bias": vision["qkv_bias"]},
        "vision_feature_layer": config.get("select_layer", -1),
    }


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
